#include "block_keys.h"

#include <algorithm>
#include <cstring>

namespace tiered_kv {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens are hashed as stored");

std::vector<uint8_t> chain_digests(const uint8_t parent[kSha256Bytes],
                                   const std::vector<uint32_t>& tokens, size_t block_size,
                                   const Extras& extras) {
  const size_t blocks = tokens.size() / block_size;
  const size_t token_bytes = block_size * sizeof(uint32_t);
  size_t longest = 0;
  for (const auto& extra : extras) longest = std::max(longest, extra.second.size());

  std::vector<uint8_t> digests(blocks * kSha256Bytes);
  constexpr size_t kHead = kSha256Bytes + sizeof(uint32_t);
  std::vector<uint8_t> message(kHead + longest + token_bytes + kSha256MaxPadding);
  size_t padded_for = SIZE_MAX;  // length of `extra` for which the message is padded
  size_t chunks = 0;
  const uint8_t* previous = parent;
  for (size_t i = 0; i < blocks; ++i) {
    const auto extra = extras.empty() ? extras.end() : extras.find(i);
    const size_t extra_bytes = extra == extras.end() ? 0 : extra->second.size();
    if (extra_bytes != padded_for) {
      const uint32_t length = uint32_t(extra_bytes);
      std::memcpy(message.data() + kSha256Bytes, &length, sizeof(length));
      chunks = sha256_pad(message.data(), kHead + extra_bytes + token_bytes);
      padded_for = extra_bytes;
    }
    std::memcpy(message.data(), previous, kSha256Bytes);
    if (extra_bytes > 0) std::memcpy(message.data() + kHead, extra->second.data(), extra_bytes);
    std::memcpy(message.data() + kHead + extra_bytes, tokens.data() + i * block_size, token_bytes);
    uint8_t* digest = digests.data() + i * kSha256Bytes;
    sha256_padded(message.data(), chunks, digest);
    previous = digest;
  }
  return digests;
}

}  // namespace tiered_kv
