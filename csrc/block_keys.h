// The hash chain that identifies the content of token blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "sha256.h"

namespace tiered_kv {

// Inputs of a block's content other than its tokens, by index of the block.
using Extras = std::unordered_map<size_t, std::string>;

// digest[i] = SHA-256(digest[i - 1] || u32le(|extra|) || extra || tokens of block i as u32le), with
// `parent` before digest[0]. `tokens` holds full blocks; the digests are returned concatenated.
std::vector<uint8_t> chain_digests(const uint8_t parent[kSha256Bytes],
                                   const std::vector<uint32_t>& tokens, size_t block_size,
                                   const Extras& extras);

}  // namespace tiered_kv
