// XXH3, 64 bits, seed 0, default secret, as published at https://xxhash.com.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tiered_kv {

uint64_t xxh3_64(const uint8_t* data, size_t size);

// Copies the bytes and returns their XXH3, reading them once. The ranges must not overlap.
uint64_t copy_xxh3_64(uint8_t* into, const uint8_t* data, size_t size);

}  // namespace tiered_kv
