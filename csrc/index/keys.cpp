#include "index/keys.h"

#include <cstring>
#include <random>

namespace tiered_kv {
namespace {

constexpr size_t kLeastCells = 16;

uint64_t rotated(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

struct SipState {
  uint64_t v0, v1, v2, v3;
  void round() {
    v0 += v1;
    v1 = rotated(v1, 13) ^ v0;
    v0 = rotated(v0, 32);
    v2 += v3;
    v3 = rotated(v3, 16) ^ v2;
    v0 += v3;
    v3 = rotated(v3, 21) ^ v0;
    v2 += v1;
    v1 = rotated(v1, 17) ^ v2;
    v2 = rotated(v2, 32);
  }
};

uint64_t random_word() {
  static thread_local std::random_device source;
  return (uint64_t{source()} << 32) | source();
}

}  // namespace

KeyHash::KeyHash() : first_(random_word()), second_(random_word()) {}

uint64_t KeyHash::operator()(std::string_view key) const {
  SipState state{first_ ^ 0x736f6d6570736575U, second_ ^ 0x646f72616e646f6dU,
                 first_ ^ 0x6c7967656e657261U, second_ ^ 0x7465646279746573U};
  const auto absorb = [&state](uint64_t word) {
    state.v3 ^= word;
    state.round();
    state.v0 ^= word;
  };
  const char* at = key.data();
  size_t left = key.size();
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, at, sizeof(word));
    absorb(word);
  }
  uint64_t last = uint64_t{key.size()} << 56;
  for (size_t i = 0; i < left; ++i) last |= uint64_t{uint8_t(at[i])} << (8 * i);
  absorb(last);
  state.v2 ^= 0xff;
  for (int i = 0; i < 3; ++i) state.round();
  return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

IdTable::IdTable(size_t expected) {
  size_t cells = kLeastCells;
  while (cells / 4 * 3 < expected) cells *= 2;
  cells_.assign(cells, {0, kNone});
  mask_ = cells - 1;
}

void IdTable::insert(uint64_t hash, uint32_t id) {
  if (size_ >= cells_.size() / 4 * 3) grow();
  cells_[place(hash, [](uint32_t) { return false; })] = {uint32_t(hash), id};
  ++size_;
}

void IdTable::erase(uint64_t hash, uint32_t id) {
  size_t hole = place(hash, [id](uint32_t other) { return other == id; });
  if (cells_[hole].id == kNone) return;
  // Moves back the ids that were displaced from their home cell by the erased one.
  for (size_t at = (hole + 1) & mask_; cells_[at].id != kNone; at = (at + 1) & mask_) {
    const size_t pushed = (at - home(cells_[at].tag)) & mask_;
    if (pushed >= ((at - hole) & mask_)) {
      cells_[hole] = cells_[at];
      hole = at;
    }
  }
  cells_[hole] = {0, kNone};
  --size_;
}

void IdTable::grow() {
  std::vector<Cell> old(cells_.size() * 2, Cell{0, kNone});
  old.swap(cells_);
  mask_ = cells_.size() - 1;
  for (const Cell& cell : old)
    if (cell.id != kNone) cells_[place(cell.tag, [](uint32_t) { return false; })] = cell;
}

}  // namespace tiered_kv
