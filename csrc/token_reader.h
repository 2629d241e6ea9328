// Reads token ids out of Python objects.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace tiered_kv {

// tokens[start:stop] of a sequence of ints or of a one-dimensional int32/int64 buffer. Throws
// ArgumentError for a range or a value that is not a token: a negative placeholder must never
// reach a key. Holds the GIL.
std::vector<uint32_t> read_tokens(const pybind11::object& tokens, int64_t start, int64_t stop);

}  // namespace tiered_kv
