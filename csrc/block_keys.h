// The hash chain that names the content of blocks of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "sha256.h"

namespace tiered_kv {

// What a block's bytes depend on beside its tokens, by index of the block.
using Extras = std::unordered_map<size_t, std::string>;

// digest[i] = SHA-256(digest[i - 1] || u32le(|extra|) || extra || tokens of block i as u32le), with
// `parent` before digest[0]. `tokens` holds whole blocks; the digests are returned end to end.
std::vector<uint8_t> chain_digests(const uint8_t parent[kSha256Bytes],
                                   const std::vector<uint32_t>& tokens, size_t block_size,
                                   const Extras& extras);

}  // namespace tiered_kv
