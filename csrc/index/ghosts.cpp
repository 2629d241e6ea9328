#include "index/ghosts.h"

#include <time.h>

#include <algorithm>

namespace tiered_kv {
namespace {

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

}  // namespace

Ghosts::Ghosts(size_t max) : ring_(std::max<size_t>(max, 1)), sums_(ring_.size() + 1) {}

void Ghosts::returned(std::string_view key) {
  const uint32_t place = place_of(hash_(key));
  if (place != kNone) remove(place);
}

std::optional<Ghost> Ghosts::find(std::string_view key) const {
  const uint32_t place = place_of(hash_(key));
  if (place == kNone) return std::nullopt;
  const Departure& departure = ring_[place];
  // The newest departure is before `next_`, and the oldest ones may be after it.
  int64_t distance = sum_before(next_) - sum_before(place);
  if (place >= next_) distance += total_;
  return Ghost{departure.at, departure.reason < 0 ? distance : 0, departure.reason};
}

void Ghosts::clear() {
  std::fill(ring_.begin(), ring_.end(), Departure{});
  std::fill(sums_.begin(), sums_.end(), 0);
  places_ = IdTable();
  next_ = 0;
  total_ = 0;
}

uint32_t Ghosts::place_of(uint64_t hash) const {
  return places_.find(hash, [&](uint32_t place) { return ring_[place].hash == hash; });
}

void Ghosts::add(std::string_view key, int64_t nbytes, int reason) {
  returned(key);
  Departure& departure = ring_[next_];
  if (departure.is_used) places_.erase(departure.hash, uint32_t(next_));
  change(next_, nbytes - departure.nbytes);  // mostly zero, when the oldest is forgotten
  departure = Departure{hash_(key), now(), nbytes, reason, true};
  places_.insert(departure.hash, uint32_t(next_));
  next_ = (next_ + 1) % ring_.size();
}

void Ghosts::remove(size_t place) {
  places_.erase(ring_[place].hash, uint32_t(place));
  change(place, -ring_[place].nbytes);
  ring_[place] = Departure{};
}

void Ghosts::change(size_t place, int64_t nbytes) {
  if (nbytes == 0) return;
  total_ += nbytes;
  for (size_t i = place + 1; i < sums_.size(); i += i & (~i + 1)) sums_[i] += nbytes;
}

int64_t Ghosts::sum_before(size_t place) const {
  int64_t sum = 0;
  for (size_t i = place; i > 0; i -= i & (~i + 1)) sum += sums_[i];
  return sum;
}

}  // namespace tiered_kv
