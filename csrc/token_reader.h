// Reads token ids out of Python objects.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace tiered_kv {

// Returns tokens[start:stop] of a sequence of ints or of a one-dimensional int32/int64 buffer.
// Throws ArgumentError for an invalid range or token: a negative placeholder must never become part
// of a key. The caller holds the GIL.
std::vector<uint32_t> read_tokens(const pybind11::object& tokens, int64_t start, int64_t stop);

}  // namespace tiered_kv
