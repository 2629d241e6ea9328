// The headers of most reads: a `get` of a few blocks, and the reply with all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tiered_kv {

struct GetHeader {
  uint64_t request_id = 0;
  size_t width = 0;  // of each key
  std::string_view keys;
};

// Reads the header of a `get` as `encode_request` writes it. Returns nothing for any other header,
// valid or not.
std::optional<GetHeader> read_get_header(std::string_view header);

constexpr size_t kMaxReplyBlocks = 31;  // their numbers fit in a msgpack bin with a 1-byte length

// Writes the header of a reply with all blocks of a request, as `encode_reply` does. There must be
// as many lengths as checksums, at most kMaxReplyBlocks.
std::string write_get_reply(uint64_t request_id, const std::vector<uint64_t>& lengths,
                            const std::vector<uint64_t>& checksums);

}  // namespace tiered_kv
