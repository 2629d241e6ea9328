// SHA-256 (FIPS 180-4).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tiered_kv {

constexpr size_t kSha256Bytes = 32;

void sha256(const uint8_t* data, size_t size, uint8_t digest[kSha256Bytes]);

// The same in two steps, for many short messages of equal length: sha256_pad writes the padding
// after the message once, and it stays valid while the message changes.
constexpr size_t kSha256MaxPadding = 72;
// Returns the number of 64-byte chunks of message and padding.
size_t sha256_pad(uint8_t* message, size_t size);
void sha256_padded(const uint8_t* message, size_t chunks, uint8_t digest[kSha256Bytes]);

}  // namespace tiered_kv
