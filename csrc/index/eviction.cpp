#include "index/eviction.h"

#include "block_layout.h"

namespace tiered_kv {

const std::vector<std::string>& policy_names() {
  static const std::vector<std::string> names = {"lru", "s3fifo"};
  return names;
}

std::unique_ptr<EvictionPolicy> make_policy(const std::string& name, EntryTable& entries,
                                            int64_t capacity) {
  if (name == "lru") return make_lru(entries);
  if (name == "s3fifo") return make_s3fifo(entries, capacity);
  throw ArgumentError("eviction", "unknown policy '" + name + "'; use lru or s3fifo");
}

}  // namespace tiered_kv
