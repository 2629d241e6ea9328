#include "get_headers.h"

namespace tiered_kv {
namespace {

// Tags of msgpack.
constexpr uint8_t kMaxFixint = 0x7f;
constexpr uint8_t kFalse = 0xc2;
constexpr uint8_t kTrue = 0xc3;
constexpr uint8_t kBin8 = 0xc4;
constexpr uint8_t kBin16 = 0xc5;
constexpr uint8_t kUint8 = 0xcc;
constexpr uint8_t kUint64 = 0xcf;

class Reader {
 public:
  explicit Reader(std::string_view data) : left_(data) {}

  // Skips this text. All functions return false, or nothing, where something else stands.
  bool skip(std::string_view text) {
    if (left_.substr(0, text.size()) != text) return false;
    left_.remove_prefix(text.size());
    return true;
  }

  std::optional<std::string_view> take(size_t count) {
    if (left_.size() < count) return std::nullopt;
    const std::string_view taken = left_.substr(0, count);
    left_.remove_prefix(count);
    return taken;
  }

  std::optional<uint64_t> big_endian(size_t bytes) {
    const auto raw = take(bytes);
    if (!raw) return std::nullopt;
    uint64_t value = 0;
    for (const char byte : *raw) value = value << 8 | uint8_t(byte);
    return value;
  }

  std::optional<uint64_t> number() {
    const auto tag = big_endian(1);
    if (!tag || *tag <= kMaxFixint) return tag;
    if (*tag < kUint8 || *tag > kUint64) return std::nullopt;
    return big_endian(size_t{1} << (*tag - kUint8));
  }

  std::optional<std::string_view> bin() {
    const auto tag = big_endian(1);
    if (!tag || (*tag != kBin8 && *tag != kBin16)) return std::nullopt;
    const auto count = big_endian(*tag == kBin8 ? 1 : 2);
    return count ? take(*count) : std::nullopt;
  }

  bool flag() {
    const auto tag = big_endian(1);
    return tag && (*tag == kFalse || *tag == kTrue);
  }

  bool at_end() const { return left_.empty(); }

 private:
  std::string_view left_;
};

void put_number(std::string& out, uint64_t value) {
  if (value <= kMaxFixint) {
    out.push_back(char(value));
    return;
  }
  int size = 0;  // the shortest form, as the power of two of its bytes
  while (size < 3 && value >> (8 << size) != 0) ++size;
  out.push_back(char(kUint8 + size));
  for (int shift = (8 << size) - 8; shift >= 0; shift -= 8) out.push_back(char(value >> shift));
}

template <typename Number>
void put_packed(std::string& out, size_t count, Number number) {
  out.push_back(char(kBin8));
  out.push_back(char(8 * count));
  for (size_t i = 0; i < count; ++i)
    for (int shift = 0; shift < 64; shift += 8) out.push_back(char(uint64_t(number(i)) >> shift));
}

}  // namespace

std::optional<GetHeader> read_get_header(std::string_view header) {
  using std::string_view_literals::operator""sv;
  Reader reader(header);
  if (!reader.skip("\x85\xa2id"sv)) return std::nullopt;
  const auto request_id = reader.number();
  if (!request_id || !reader.skip("\xa2op\xa3get\xa5width"sv)) return std::nullopt;
  const auto width = reader.number();
  if (!width || *width == 0 || !reader.skip("\xa4keys"sv)) return std::nullopt;
  const auto keys = reader.bin();
  if (!keys || keys->size() % *width != 0 || !reader.skip("\xa6stream"sv)) return std::nullopt;
  if (!reader.flag() || !reader.at_end()) return std::nullopt;
  return GetHeader{*request_id, size_t(*width), *keys};
}

std::string write_get_reply(uint64_t request_id, const std::vector<uint64_t>& lengths,
                            const std::vector<uint64_t>& checksums) {
  using std::string_view_literals::operator""sv;
  const size_t count = lengths.size();
  std::string out;
  out.reserve(64 + size_t{24} * count);
  out += "\x86\xa2id"sv;
  put_number(out, request_id);
  out += "\xa2op\xa3get\xa2ok\xc3\xa9positions"sv;
  put_packed(out, count, [](size_t i) { return i; });
  out += "\xa7lengths"sv;
  put_packed(out, count, [&](size_t i) { return lengths[i]; });
  out +=
      "\xa9"
      "checksums"sv;
  put_packed(out, count, [&](size_t i) { return checksums[i]; });
  return out;
}

}  // namespace tiered_kv
