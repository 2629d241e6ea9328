// Python binding of the index: converts arguments, makes one call, translates errors.
#include "index/module.h"

#include <malloc.h>
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "binding.h"
#include "index/block_index.h"
#include "index/durable_index.h"
#include "index/ghosts.h"

namespace tiered_kv {
namespace {

// Returns the bytes of a key; the caller keeps the object alive.
std::string_view key_of(const py::handle& object, const char* name = "key") {
  if (!PyBytes_Check(object.ptr())) throw ArgumentError(name, "not bytes");
  return {PyBytes_AS_STRING(object.ptr()), size_t(PyBytes_GET_SIZE(object.ptr()))};
}

std::optional<std::string_view> optional_key(const py::handle& object, const char* name) {
  if (object.is_none()) return std::nullopt;
  return key_of(object, name);
}

py::bytes to_bytes(std::string_view key) { return {key.data(), key.size()}; }

// The items of any iterable. They are copied to a tuple, because a hook may change a list.
class Items {
 public:
  explicit Items(const py::object& sequence, const char* name)
      : items_(py::reinterpret_steal<py::object>(PySequence_Tuple(sequence.ptr()))) {
    if (items_) return;
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    throw ArgumentError(name, "not a sequence");
  }
  size_t size() const { return size_t(PyTuple_GET_SIZE(items_.ptr())); }
  py::handle operator[](size_t i) const { return PyTuple_GET_ITEM(items_.ptr(), py::ssize_t(i)); }

 private:
  py::object items_;
};

class Keys {
 public:
  explicit Keys(const py::object& keys) : items_(keys, "keys") {}
  size_t size() const { return items_.size(); }
  std::string_view operator[](size_t i) const { return key_of(items_[i], "keys"); }

  std::vector<std::string_view> part(size_t start, size_t stop) const {
    std::vector<std::string_view> keys;
    keys.reserve(stop - start);
    for (size_t i = start; i < stop; ++i) keys.push_back((*this)[i]);
    return keys;
  }
  std::vector<std::string_view> all() const { return part(0, size()); }

 private:
  Items items_;
};

std::vector<int64_t> numbers(const py::object& values, const char* name) {
  const Items items(values, name);
  std::vector<int64_t> read(items.size());
  for (size_t i = 0; i < read.size(); ++i) {
    read[i] = PyLong_AsLongLong(items[i].ptr());
    if (read[i] == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  }
  return read;
}

struct Range {
  Range(int64_t first, int64_t last, size_t size) {
    const auto end = int64_t(size);
    stop = size_t(last < 0 || last > end ? end : last);
    start = std::min(size_t(std::max<int64_t>(first, 0)), stop);
  }
  size_t start;
  size_t stop;
};

py::object slot_or_none(int64_t slot) {
  return slot == kNoSlot ? py::object(py::none()) : py::object(py::int_(slot));
}

py::tuple named(const BlockName& name) {
  py::object before = py::none();
  if (name.before) before = to_bytes(*name.before);
  return py::make_tuple(to_bytes(name.key), before);
}

// A Python function that C++ can copy without changing its reference count.
std::shared_ptr<const py::object> shared(const py::object& function) {
  return function.is_none() ? nullptr : std::make_shared<const py::object>(function);
}

IndexHooks make_hooks(const py::object& on_evict, const py::object& may_evict,
                      const py::object& is_below, const py::object& now) {
  IndexHooks hooks;
  if (const auto call = shared(on_evict))
    hooks.on_evict = [call](std::string_view key, int64_t nbytes) {
      (*call)(to_bytes(key), nbytes);
    };
  if (const auto call = shared(may_evict))
    hooks.may_evict = [call](std::string_view key) {
      return bool(py::bool_((*call)(to_bytes(key))));
    };
  if (const auto call = shared(is_below))
    hooks.is_below = [call](std::string_view key) {
      return bool(py::bool_((*call)(to_bytes(key))));
    };
  if (const auto call = shared(now)) hooks.now = [call] { return (*call)().cast<uint64_t>(); };
  return hooks;
}

IndexHooks with_ghosts(IndexHooks hooks, std::shared_ptr<Ghosts> ghosts) {
  hooks.ghosts = std::move(ghosts);
  return hooks;
}

// Returns how many keys from `start` on have at least this lookup result, without a gap.
int64_t count_leading(const BlockIndex& index, const py::object& keys, int64_t start, int64_t stop,
                      Lookup least) {
  constexpr size_t kAtOnce = 256;  // usually the gap is near the start, or there is none
  const Keys all(keys);
  const Range range(start, stop, all.size());
  std::vector<Lookup> found;
  for (size_t at = range.start; at < range.stop; at += kAtOnce) {
    index.lookup(all.part(at, std::min(at + kAtOnce, range.stop)), found);
    for (size_t i = 0; i < found.size(); ++i)
      if (found[i] < least) return int64_t(at + i - range.start);
  }
  return int64_t(range.stop - range.start);
}

std::vector<bool> are_readable(const BlockIndex& index, const py::object& keys) {
  std::vector<Lookup> found;
  index.lookup(Keys(keys).all(), found);
  std::vector<bool> readable(found.size());
  for (size_t i = 0; i < found.size(); ++i) readable[i] = found[i] == Lookup::kHit;
  return readable;
}

std::vector<bool> are_missing(const BlockIndex& index, const py::object& keys) {
  std::vector<Lookup> found;
  index.lookup(Keys(keys).all(), found);
  std::vector<bool> missing(found.size());
  for (size_t i = 0; i < found.size(); ++i) missing[i] = found[i] == Lookup::kMiss;
  return missing;
}

// Touches from the tail to the head, so that the head is the most recently used.
void touch(BlockIndex& index, const py::object& keys) {
  const Keys all(keys);
  for (size_t i = all.size(); i-- > 0;) index.touch(all[i]);
}

// Reserves slots for the missing blocks in [start, stop), except those in `skip`, in chain order:
// if room runs out, the tail of the sequence is dropped, never its head.
py::tuple reserve_missing(BlockIndex& index, const py::object& keys, int64_t start, int64_t stop,
                          int64_t skip_start, int64_t skip_stop, uint32_t size_class) {
  const Keys all(keys);
  const Range range(start, stop, all.size());
  const auto is_skipped = [&](size_t i) {
    return int64_t(i) >= skip_start && int64_t(i) < skip_stop;
  };
  std::vector<Lookup> found;
  index.lookup(all.part(range.start, range.stop), found);
  int64_t left = 0;
  for (size_t i = range.start; i < range.stop; ++i)
    if (!is_skipped(i) && found[i - range.start] == Lookup::kMiss) ++left;
  std::vector<int64_t> positions;
  std::vector<int64_t> slots;
  int64_t dropped = 0;
  const bool is_all_here = left == 0;
  for (size_t i = range.start; !is_all_here && i < range.stop; ++i) {
    // Look up again: reserving an earlier block may have evicted this one.
    if (is_skipped(i) || index.lookup(all[i]) != Lookup::kMiss) continue;
    left = std::max<int64_t>(0, left - 1);
    const std::optional<std::string_view> before =
        i != 0 ? std::optional(all[i - 1]) : std::nullopt;
    const int64_t slot = index.reserve({all[i], before}, size_class, left);
    if (slot == kNoSlot) {
      dropped = int64_t(range.stop - i);
      break;
    }
    positions.push_back(int64_t(i));
    slots.push_back(slot);
  }
  return py::make_tuple(positions, slots, dropped);
}

std::vector<BlockName> names_of(const Keys& keys, const Items& before) {
  if (keys.size() != before.size())
    throw ArgumentError("parents", std::to_string(before.size()) + " parents for " +
                                       std::to_string(keys.size()) + " keys");
  std::vector<BlockName> names(keys.size());
  for (size_t i = 0; i < names.size(); ++i)
    names[i] = {keys[i], optional_key(before[i], "parents")};
  return names;
}

// Reserves slots for blocks of one class in this order, until one finds no room. Blocks that are
// already present get kNoSlot.
std::vector<int64_t> reserve_all(BlockIndex& index, const py::object& keys,
                                 const py::object& parents, uint32_t size_class) {
  const Keys all(keys);
  const Items before(parents, "parents");
  const std::vector<BlockName> names = names_of(all, before);
  std::vector<Lookup> found;
  index.lookup(all.all(), found);
  std::vector<int64_t> more(names.size());  // new blocks that directly follow each one in its chain
  for (size_t i = names.size(); i-- > 1;)
    if (found[i] == Lookup::kMiss && names[i].before == names[i - 1].key) more[i - 1] = more[i] + 1;
  std::vector<int64_t> slots;
  slots.reserve(names.size());
  try {
    for (size_t i = 0; i < names.size(); ++i) {
      // Look up again: reserving an earlier block may have evicted or added this one.
      if (index.lookup(names[i].key) != Lookup::kMiss) {
        slots.push_back(kNoSlot);
        continue;
      }
      const int64_t slot = index.reserve(names[i], size_class, more[i]);
      if (slot == kNoSlot) break;
      slots.push_back(slot);
    }
  } catch (...) {  // the caller would not learn of these reservations
    for (const int64_t slot : slots)
      if (slot != kNoSlot) index.abort(slot);
    throw;
  }
  return slots;
}

Geometry make_geometry(int64_t capacity_bytes, int64_t slab_bytes, int64_t num_slabs,
                       int64_t slots_per_slab) {
  return {capacity_bytes, slab_bytes, num_slabs, slots_per_slab};
}

template <typename T>
using Column = py::array_t<T, 0>;  // any strides, no conversion

// The keys in a column of fixed width; a length of 0 means no key.
class KeyColumn {
 public:
  KeyColumn(const Column<uint8_t>& keys, const Column<uint8_t>& sizes, const char* name)
      : keys_(keys.unchecked<2>()), sizes_(sizes.unchecked<1>()), name_(name) {
    if (keys_.shape(0) != sizes_.shape(0))
      throw ArgumentError(name, "differs in length from the column of key lengths");
    if (keys_.shape(1) > 1 && keys.strides(1) != 1)
      throw ArgumentError(name, "the bytes of a key are not contiguous");
  }
  std::optional<std::string_view> operator[](py::ssize_t row) const {
    const uint8_t nbytes = sizes_(row);
    if (nbytes > keys_.shape(1)) throw ArgumentError(name_, "a key is longer than its column");
    if (nbytes == 0) return std::nullopt;
    return std::string_view(reinterpret_cast<const char*>(keys_.data(row, 0)), nbytes);
  }
  py::ssize_t size() const { return keys_.shape(0); }

 private:
  py::detail::unchecked_reference<uint8_t, 2> keys_;
  py::detail::unchecked_reference<uint8_t, 1> sizes_;
  const char* name_;
};

// Like `restore`, from the columns of a table, because lists of a million items would take seconds.
void restore_rows(DurableIndex& index, const Column<uint8_t>& keys,
                  const Column<uint8_t>& key_bytes, const Column<uint8_t>& parents,
                  const Column<uint8_t>& parent_bytes, const Column<int64_t>& slots,
                  const Column<int64_t>& size_classes, const Column<uint32_t>& lengths,
                  const Column<uint64_t>& checksums) {
  const KeyColumn names(keys, key_bytes, "keys");
  const KeyColumn before(parents, parent_bytes, "parents");
  const py::ssize_t count = names.size();
  for (const py::ssize_t size :
       {before.size(), slots.size(), size_classes.size(), lengths.size(), checksums.size()})
    if (size != count)
      throw ArgumentError("rows",
                          std::to_string(size) + " entries for " + std::to_string(count) + " keys");
  std::vector<BlockName> all(static_cast<size_t>(count));
  std::vector<int64_t> where(all.size());
  std::vector<int64_t> classes(all.size());
  std::vector<DurableIndex::Facts> facts(all.size());
  for (py::ssize_t row = 0; row < count; ++row) {
    all[size_t(row)] = {names[row].value_or(std::string_view()), before[row]};
    where[size_t(row)] = slots.at(row);
    classes[size_t(row)] = size_classes.at(row);
    facts[size_t(row)] = {lengths.at(row), checksums.at(row)};
  }
  index.restore(all, where, classes, facts);
}

// glibc keeps freed memory: after opening a large index, half as much as the index itself takes.
void release_free_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Returns all readable blocks as such columns, least recently used first, without their classes.
py::tuple rows(const DurableIndex& index, size_t width) {
  const std::vector<int64_t> order = index.coldest_first();
  const auto count = py::ssize_t(order.size());
  py::array_t<uint8_t> keys({count, py::ssize_t(width)});
  py::array_t<uint8_t> parents({count, py::ssize_t(width)});
  py::array_t<uint8_t> key_bytes(count);
  py::array_t<uint8_t> parent_bytes(count);
  py::array_t<int64_t> slots(count);
  py::array_t<uint32_t> lengths(count);
  py::array_t<uint64_t> checksums(count);
  const auto put = [width](py::array_t<uint8_t>& column, py::array_t<uint8_t>& sizes,
                           py::ssize_t row, std::string_view key) {
    if (key.size() > width) throw ArgumentError("width", "a key is longer than the column");
    uint8_t* const at = column.mutable_data(row, 0);
    std::memset(at, 0, width);
    if (!key.empty()) std::memcpy(at, key.data(), key.size());
    *sizes.mutable_data(row) = uint8_t(key.size());
  };
  for (py::ssize_t row = 0; row < count; ++row) {
    const int64_t slot = order[size_t(row)];
    const BlockName name = index.block_in(slot);
    const DurableIndex::Facts facts = index.facts_in(slot);
    put(keys, key_bytes, row, name.key);
    put(parents, parent_bytes, row, name.before.value_or(std::string_view()));
    *slots.mutable_data(row) = slot;
    *lengths.mutable_data(row) = facts.length;
    *checksums.mutable_data(row) = facts.checksum;
  }
  return py::make_tuple(keys, key_bytes, parents, parent_bytes, slots, lengths, checksums);
}

void translate_invariant_errors() {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const InvariantError& error) {
      raise("InvariantError", error.what());
    }
  });
}

void bind_slot_pool(const py::module_& module) {
  py::class_<SlotPool>(module, "SlotPool")
      .def(py::init([](int64_t capacity_bytes, int64_t slab_bytes, int64_t num_slabs,
                       int64_t slots_per_slab) {
             return std::make_unique<SlotPool>(
                 make_geometry(capacity_bytes, slab_bytes, num_slabs, slots_per_slab));
           }),
           py::arg("capacity_bytes"), py::arg("slab_bytes"), py::arg("num_slabs"),
           py::arg("slots_per_slab"))
      .def("add_class", &SlotPool::add_class, py::arg("slot_bytes"))
      .def(
          "allocate",
          [](SlotPool& self, uint32_t size_class) {
            return slot_or_none(self.allocate(size_class));
          },
          py::arg("size_class"))
      .def(
          "adopt",
          [](SlotPool& self, const py::object& slots, const py::object& size_classes) {
            self.adopt(numbers(slots, "slots"), numbers(size_classes, "size_classes"));
          },
          py::arg("slots"), py::arg("size_classes"))
      .def("release", &SlotPool::release, py::arg("slot"));
}

void bind_ghosts(const py::module_& module) {
  py::class_<Ghosts, std::shared_ptr<Ghosts>>(module, "Ghosts")
      .def_property_readonly_static("EVICTED_AFTER_SENT",
                                    [](const py::object&) { return Ghosts::kEvictedAfterSent; })
      .def(py::init<size_t>(), py::arg("max"))
      .def("__len__", &Ghosts::size)
      .def(
          "dropped",
          [](Ghosts& self, const py::handle& key, int reason) {
            self.dropped(key_of(key), reason);
          },
          py::arg("key"), py::arg("reason"))
      .def(
          "find",
          [](const Ghosts& self, const py::handle& key) -> py::object {
            const auto found = self.find(key_of(key));
            if (!found) return py::none();
            return py::make_tuple(found->at, found->distance, found->reason);
          },
          py::arg("key"))
      .def(
          "evicted_run",
          [](const Ghosts& self, const py::object& keys, int64_t start, int64_t stop) {
            const Keys all(keys);
            const Range range(start, stop, all.size());
            std::vector<int64_t> distances;
            for (size_t i = range.start; i < range.stop; ++i) {
              const auto found = self.find(all[i]);
              if (!found || found->reason >= 0) break;
              distances.push_back(found->distance);
            }
            return distances;
          },
          py::arg("keys"), py::arg("start"), py::arg("stop"));
}

void bind_block_index(const py::module_& module) {
  py::class_<BlockIndex>(module, "BlockIndex")
      .def(py::init([](int64_t capacity_bytes, int64_t slab_bytes, int64_t num_slabs,
                       int64_t slots_per_slab, std::string eviction, const py::object& on_evict,
                       const py::object& may_evict, const py::object& is_below,
                       const py::object& now, std::shared_ptr<Ghosts> ghosts) {
             return std::make_unique<BlockIndex>(
                 make_geometry(capacity_bytes, slab_bytes, num_slabs, slots_per_slab),
                 std::move(eviction),
                 with_ghosts(make_hooks(on_evict, may_evict, is_below, now), std::move(ghosts)));
           }),
           py::arg("capacity_bytes"), py::arg("slab_bytes"), py::arg("num_slabs"),
           py::arg("slots_per_slab"), py::arg("eviction"), py::arg("on_evict"),
           py::arg("may_evict"), py::arg("is_below"), py::arg("now"), py::arg("ghosts"))
      .def(
          "add_class",
          [](BlockIndex& self, int64_t slot_bytes, const py::bytes& owner) {
            return self.add_class(slot_bytes, std::string(owner));
          },
          py::arg("slot_bytes"), py::arg("owner"))
      .def(
          "reuse_class",
          [](BlockIndex& self, int64_t slot_bytes, const py::bytes& owner) {
            const uint32_t number = self.reuse_class(slot_bytes, std::string(owner));
            return number == kNone ? std::nullopt : std::optional(number);
          },
          py::arg("slot_bytes"), py::arg("owner"))
      .def(
          "set_quota",
          [](BlockIndex& self, const py::bytes& owner, int64_t quota_bytes) {
            self.set_quota(std::string(owner), quota_bytes);
          },
          py::arg("owner"), py::arg("quota_bytes"))
      .def(
          "forget_quota",
          [](BlockIndex& self, const py::bytes& owner) { self.forget_quota(std::string(owner)); },
          py::arg("owner"))
      .def_property_readonly("quotas", &BlockIndex::quotas)
      .def("limit", &BlockIndex::limit, py::arg("usable_bytes"))
      .def_property_readonly("used_bytes", &BlockIndex::used_bytes)
      .def_property_readonly("readable", &BlockIndex::readable)
      .def_property_readonly("held", &BlockIndex::held)
      .def(
          "lookup",
          [](const BlockIndex& self, const py::handle& key) {
            return int(self.lookup(key_of(key)));
          },
          py::arg("key"))
      .def(
          "match_prefix",
          [](const BlockIndex& self, const py::object& keys, int64_t start, int64_t stop) {
            return count_leading(self, keys, start, stop, Lookup::kHit);
          },
          py::arg("keys"), py::arg("start"), py::arg("stop"))
      .def(
          "match_known",
          [](const BlockIndex& self, const py::object& keys, int64_t start, int64_t stop) {
            return count_leading(self, keys, start, stop, Lookup::kPending);
          },
          py::arg("keys"), py::arg("start"), py::arg("stop"))
      .def("are_readable", &are_readable, py::arg("keys"))
      .def("are_missing", &are_missing, py::arg("keys"))
      .def(
          "slot_of",
          [](const BlockIndex& self, const py::handle& key) {
            return slot_or_none(self.slot_of(key_of(key)));
          },
          py::arg("key"))
      .def(
          "block_in",
          [](const BlockIndex& self, int64_t slot) { return named(self.block_in(slot)); },
          py::arg("slot"))
      .def(
          "blocks_in",
          [](const BlockIndex& self, const py::object& slots) {
            py::list blocks;
            for (const int64_t slot : numbers(slots, "slots"))
              blocks.append(named(self.block_in(slot)));
            return blocks;
          },
          py::arg("slots"))
      .def("slots",
           [](const BlockIndex& self) {
             std::vector<std::tuple<int64_t, py::bytes, bool, uint32_t, uint64_t>> all;
             self.for_each([&](const Entry& entry, std::string_view key) {
               all.emplace_back(entry.slot, to_bytes(key), entry.is_visible(), entry.pins,
                                entry.used);
             });
             return all;
           })
      .def("touch", &touch, py::arg("keys"))
      .def(
          "mark_dead",
          [](BlockIndex& self, const py::object& keys) { self.mark_dead(Keys(keys).all()); },
          py::arg("keys"))
      .def(
          "expect_again",
          [](BlockIndex& self, const py::object& keys, double seconds) {
            self.expect_again(Keys(keys).all(), seconds);
          },
          py::arg("keys"), py::arg("seconds"))
      .def(
          "pin",
          [](BlockIndex& self, const py::object& keys) { return self.pin(Keys(keys).all()); },
          py::arg("keys"))
      .def(
          "pin_slots",
          [](BlockIndex& self, const py::object& slots) {
            self.pin_slots(numbers(slots, "slots"));
          },
          py::arg("slots"))
      .def(
          "unpin",
          [](BlockIndex& self, const py::object& slots) { self.unpin(numbers(slots, "slots")); },
          py::arg("slots"))
      .def(
          "reserve",
          [](BlockIndex& self, const py::handle& key, const py::handle& parent, uint32_t size_class,
             int64_t more) {
            return slot_or_none(
                self.reserve({key_of(key), optional_key(parent, "parent")}, size_class, more));
          },
          py::arg("key"), py::arg("parent"), py::arg("size_class"), py::arg("more"))
      .def("reserve_missing", &reserve_missing, py::arg("keys"), py::arg("start"), py::arg("stop"),
           py::arg("skip_start"), py::arg("skip_stop"), py::arg("size_class"))
      .def("reserve_all", &reserve_all, py::arg("keys"), py::arg("parents"), py::arg("size_class"))
      .def("commit", &BlockIndex::commit, py::arg("slot"))
      .def(
          "commit_all",
          [](BlockIndex& self, const py::object& slots) {
            std::vector<bool> readable;
            for (const int64_t slot : numbers(slots, "slots"))
              readable.push_back(self.commit(slot));
            return readable;
          },
          py::arg("slots"))
      .def(
          "commit_each",
          [](BlockIndex& self, const py::object& slots) {
            std::vector<std::variant<bool, std::string>> outcomes;
            for (const int64_t slot : numbers(slots, "slots")) {
              try {
                outcomes.emplace_back(self.commit(slot));
              } catch (const std::exception& error) {
                outcomes.emplace_back(std::string(error.what()));
              }
            }
            return outcomes;
          },
          py::arg("slots"))
      .def(
          "mark_sent",
          [](BlockIndex& self, const py::object& slots) {
            self.mark_sent(numbers(slots, "slots"));
          },
          py::arg("slots"))
      .def("abort", &BlockIndex::abort, py::arg("slot"))
      .def(
          "remove",
          [](BlockIndex& self, const py::handle& key, const py::object& in_slot) {
            return self.remove(key_of(key), in_slot.is_none() ? kNoSlot : in_slot.cast<int64_t>());
          },
          py::arg("key"), py::arg("in_slot"))
      .def("clear", &BlockIndex::clear)
      .def("take_evicted", &BlockIndex::take_evicted)
      .def("check", &BlockIndex::check);
}

void bind_durable_index(const py::module_& module) {
  py::class_<DurableIndex, BlockIndex>(module, "DurableIndex")
      .def(py::init([](int64_t capacity_bytes, int64_t slab_bytes, int64_t num_slabs,
                       int64_t slots_per_slab, std::string eviction, const py::object& on_evict,
                       const py::object& on_leave) {
             std::function<void(int64_t)> leave;
             if (const auto call = shared(on_leave))
               leave = [call](int64_t slot) { (*call)(slot); };
             return std::make_unique<DurableIndex>(
                 make_geometry(capacity_bytes, slab_bytes, num_slabs, slots_per_slab),
                 std::move(eviction), make_hooks(on_evict, py::none(), py::none(), py::none()),
                 std::move(leave));
           }),
           py::arg("capacity_bytes"), py::arg("slab_bytes"), py::arg("num_slabs"),
           py::arg("slots_per_slab"), py::arg("eviction"), py::arg("on_evict"), py::arg("on_leave"))
      .def("free_slots", &DurableIndex::free_slots, py::arg("size_class"))
      .def("owned_slots", &DurableIndex::owned_slots, py::arg("size_class"))
      .def("coldest_first", &DurableIndex::coldest_first)
      .def(
          "make_room",
          [](DurableIndex& self, uint32_t size_class, int64_t slots, const py::handle& parent) {
            return self.make_room(size_class, slots, optional_key(parent, "parent"));
          },
          py::arg("size_class"), py::arg("slots"), py::arg("parent"))
      .def(
          "evict_coldest",
          [](DurableIndex& self, const py::handle& parent) {
            return self.evict_coldest(optional_key(parent, "parent"));
          },
          py::arg("parent"))
      .def_property_readonly("has_quarantined", &DurableIndex::has_quarantined)
      .def("take_quarantined", &DurableIndex::take_quarantined)
      .def(
          "quarantine_again",
          [](DurableIndex& self, const py::object& slots) {
            self.quarantine_again(numbers(slots, "slots"));
          },
          py::arg("slots"))
      .def(
          "release",
          [](DurableIndex& self, const py::object& slots) {
            self.release(numbers(slots, "slots"));
          },
          py::arg("slots"))
      .def("retire", &DurableIndex::retire, py::arg("slot"))
      .def(
          "set_facts",
          [](DurableIndex& self, int64_t slot, uint32_t length, uint64_t checksum) {
            self.set_facts(slot, {length, checksum});
          },
          py::arg("slot"), py::arg("length"), py::arg("checksum"))
      .def(
          "facts_in",
          [](const DurableIndex& self, int64_t slot) {
            const DurableIndex::Facts facts = self.facts_in(slot);
            return std::make_pair(facts.length, facts.checksum);
          },
          py::arg("slot"))
      .def("rows", &rows, py::arg("width"))
      .def("restore_rows", &restore_rows, py::arg("keys"), py::arg("key_bytes"), py::arg("parents"),
           py::arg("parent_bytes"), py::arg("slots"), py::arg("size_classes"), py::arg("lengths"),
           py::arg("checksums"))
      .def(
          "restore",
          [](DurableIndex& self, const py::object& keys, const py::object& parents,
             const py::object& slots, const py::object& size_classes) {
            const Keys names(keys);
            const Items before(parents, "parents");
            self.restore(names_of(names, before), numbers(slots, "slots"),
                         numbers(size_classes, "size_classes"));
          },
          py::arg("keys"), py::arg("parents"), py::arg("slots"), py::arg("size_classes"));
}

}  // namespace

void bind_index(py::module_& module) {
  translate_invariant_errors();
  bind_slot_pool(module);
  bind_ghosts(module);
  bind_block_index(module);
  bind_durable_index(module);
  module.def("release_free_memory", &release_free_memory);
  module.attr("EVICTION_POLICIES") = policy_names();
}

}  // namespace tiered_kv
