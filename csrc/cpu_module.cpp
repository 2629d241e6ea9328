// Python binding of the CPU module: converts arguments, makes one call, translates errors.
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string_view>

#include "binding.h"
#include "block_copy_cpu.h"
#include "block_keys.h"
#include "cpu_features.h"
#include "file_blocks.h"
#include "fills.h"
#include "get_headers.h"
#include "index/module.h"
#include "sha256.h"
#include "thread_pool.h"
#include "token_reader.h"
#include "xxh3.h"
#include "zmq_receiver.h"
#include "zmq_sender.h"

namespace tiered_kv {
namespace {

constexpr size_t kKeyHashBytes = 16;
// With fewer bytes, releasing the GIL costs more than it gains.
constexpr size_t kGilBytes = 4096;
// With fewer bytes, waking a helper thread costs more than it saves.
constexpr uint64_t kSerialBytes = uint64_t{1} << 20;

void copy(const BlockLayout& layout, const py::object& block_ids, int64_t address, int64_t nbytes,
          const py::object& slot_offsets, int64_t threads, Direction direction) {
  const Batch batch = make_batch(block_ids, slot_offsets);
  check_batch(layout, batch, direction, "region", address, nbytes);
  const int count = thread_count(threads);
  const py::gil_scoped_release no_gil;
  copy_blocks(layout, batch, direction, reinterpret_cast<uint8_t*>(address), count);
}

void gather(const BlockLayout& layout, const py::object& block_ids, int64_t address, int64_t nbytes,
            const py::object& slot_offsets, int64_t threads) {
  copy(layout, block_ids, address, nbytes, slot_offsets, threads, Direction::kGather);
}

void scatter(const BlockLayout& layout, const py::object& block_ids, int64_t address,
             int64_t nbytes, const py::object& slot_offsets, int64_t threads) {
  copy(layout, block_ids, address, nbytes, slot_offsets, threads, Direction::kScatter);
}

py::array_t<uint64_t> checksum(int64_t address, int64_t region_nbytes, const py::object& offsets,
                               int64_t nbytes, int64_t threads) {
  checked_range("region", address, region_nbytes);
  if (nbytes < 0) throw ArgumentError("nbytes", std::to_string(nbytes) + " is negative");
  const std::vector<int64_t> starts = to_vector<int64_t>(offsets, "offsets");
  for (size_t i = 0; i < starts.size(); ++i) {
    if (starts[i] < 0 || nbytes > region_nbytes || starts[i] > region_nbytes - nbytes)
      throw ArgumentError("offsets[" + std::to_string(i) + "]",
                          std::to_string(nbytes) + " bytes at " + std::to_string(starts[i]) +
                              " are not within the region of " + std::to_string(region_nbytes));
  }
  int count = thread_count(threads);
  if (starts.size() * uint64_t(nbytes) < kSerialBytes) count = 1;
  py::array_t<uint64_t> sums(py::ssize_t(starts.size()));
  uint64_t* out = sums.mutable_data();
  const auto* base = reinterpret_cast<const uint8_t*>(address);
  const py::gil_scoped_release no_gil;
  parallel_for(starts.size(), count,
               [&](size_t i) { out[i] = xxh3_64(base + starts[i], size_t(nbytes)); });
  return sums;
}

// The bytes of a C-contiguous buffer.
struct Bytes {
  explicit Bytes(const py::handle& data, const std::string& name = "data",
                 int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(data.ptr(), &view, flags) != 0) {
      PyErr_Clear();
      const char* kind = (flags & PyBUF_WRITABLE) != 0 ? "writable " : "";
      throw ArgumentError(name, std::string("not a contiguous ") + kind + "buffer");
    }
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view); }
  uint8_t* data() const { return static_cast<uint8_t*>(view.buf); }
  size_t size() const { return size_t(view.len); }
  Py_buffer view;
};

uint64_t hash_buffer(const py::buffer& data) {
  const Bytes bytes(data);
  if (bytes.size() < kGilBytes) return xxh3_64(bytes.data(), bytes.size());
  const py::gil_scoped_release no_gil;
  return xxh3_64(bytes.data(), bytes.size());
}

std::deque<Bytes> open_buffers(const py::sequence& buffers, const std::string& name, int flags) {
  std::deque<Bytes> opened;
  for (size_t i = 0; i < buffers.size(); ++i)
    opened.emplace_back(buffers[i], name + "[" + std::to_string(i) + "]", flags);
  return opened;
}

// Returns how many threads are worth waking for these buffers.
int threads_for(const std::deque<Bytes>& buffers, int64_t threads) {
  const int count = thread_count(threads);
  uint64_t total = 0;
  for (const Bytes& buffer : buffers) total += buffer.size();
  return total < kSerialBytes ? 1 : count;
}

std::vector<uint64_t> hash_buffers(const py::sequence& buffers, int64_t threads) {
  const std::deque<Bytes> opened = open_buffers(buffers, "buffers", PyBUF_SIMPLE);
  const int count = threads_for(opened, threads);
  std::vector<uint64_t> sums(opened.size());
  const py::gil_scoped_release no_gil;
  parallel_for(opened.size(), count,
               [&](size_t i) { sums[i] = xxh3_64(opened[i].data(), opened[i].size()); });
  return sums;
}

// Sends with zmq_send_const, whose address the caller passes. Returns 0 or the first errno.
int send_frames(uintptr_t function, uintptr_t socket, const py::sequence& buffers, int flags) {
  if (function == 0 || socket == 0) throw ArgumentError("function, socket", "a null address");
  const std::deque<Bytes> opened = open_buffers(buffers, "buffers", PyBUF_SIMPLE);
  auto* const send = reinterpret_cast<int (*)(void*, const void*, size_t, int)>(function);
  const py::gil_scoped_release no_gil;
  for (const Bytes& frame : opened)
    while (send(reinterpret_cast<void*>(socket), frame.data(), frame.size(), flags) < 0)
      if (errno != EINTR) return errno;
  return 0;
}

std::unique_ptr<ZmqReceiver> make_zmq_receiver(uintptr_t socket, uintptr_t recv, uintptr_t msg_init,
                                               uintptr_t msg_recv, uintptr_t msg_data,
                                               uintptr_t msg_size, uintptr_t msg_more,
                                               uintptr_t msg_get, uintptr_t msg_gets,
                                               uintptr_t msg_close) {
  for (const uintptr_t address : {socket, recv, msg_init, msg_recv, msg_data, msg_size, msg_more,
                                  msg_get, msg_gets, msg_close})
    if (address == 0) throw ArgumentError("socket, functions", "a null address");
  using Functions = ZmqReceiveFunctions;
  return std::make_unique<ZmqReceiver>(
      Functions{reinterpret_cast<decltype(Functions::recv)>(recv),
                reinterpret_cast<decltype(Functions::msg_init)>(msg_init),
                reinterpret_cast<decltype(Functions::msg_recv)>(msg_recv),
                reinterpret_cast<decltype(Functions::msg_data)>(msg_data),
                reinterpret_cast<decltype(Functions::msg_size)>(msg_size),
                reinterpret_cast<decltype(Functions::msg_more)>(msg_more),
                reinterpret_cast<decltype(Functions::msg_get)>(msg_get),
                reinterpret_cast<decltype(Functions::msg_gets)>(msg_gets),
                reinterpret_cast<decltype(Functions::msg_close)>(msg_close)},
      reinterpret_cast<void*>(socket));
}

// Returns None, or identity, the first `most` bytes of the header, its length, descriptor of the
// connection or None, user, and whether frames follow. Keeps the GIL: nothing here waits.
py::object receive_header(ZmqReceiver& receiver, size_t most) {
  if (!receiver.receive()) return py::none();
  const std::string_view identity = receiver.identity(), header = receiver.header();
  const char* user = receiver.user();
  const int descriptor = receiver.descriptor();
  py::tuple received =
      py::make_tuple(py::bytes(identity), py::bytes(header.substr(0, most)), header.size(),
                     descriptor < 0 ? py::object(py::none()) : py::object(py::int_(descriptor)),
                     py::str(user == nullptr ? "" : user), receiver.has_more());
  receiver.release();
  return received;
}

// Returns how many frames it has dropped, their bytes, and whether more follow.
py::tuple drop_frames(ZmqReceiver& receiver, size_t most) {
  size_t dropped = 0, bytes = 0;
  bool has_more = false;
  {
    const py::gil_scoped_release no_gil;
    has_more = receiver.drop(most, dropped, bytes);
  }
  return py::make_tuple(dropped, bytes, has_more);
}

ZmqSender make_zmq_sender(uintptr_t send, uintptr_t msg_init_data, uintptr_t msg_send,
                          uintptr_t msg_close) {
  if (send == 0 || msg_init_data == 0 || msg_send == 0 || msg_close == 0)
    throw ArgumentError("functions", "a null address");
  return ZmqSender({reinterpret_cast<decltype(ZmqFunctions::send)>(send),
                    reinterpret_cast<decltype(ZmqFunctions::msg_init_data)>(msg_init_data),
                    reinterpret_cast<decltype(ZmqFunctions::msg_send)>(msg_send),
                    reinterpret_cast<decltype(ZmqFunctions::msg_close)>(msg_close)});
}

// Keeps the GIL: nothing here waits, and taking it again would cost more than the call.
int send_message(ZmqSender& sender, uintptr_t socket, const py::bytes& identity,
                 const py::bytes& header, const py::sequence& payload, bool copies,
                 uint64_t ticket) {
  if (socket == 0) throw ArgumentError("socket", "a null address");
  if (!copies && ticket == 0 && !payload.empty())
    throw ArgumentError("ticket", "a payload that is not copied needs one");
  const Bytes to(identity), head(header);
  const std::deque<Bytes> opened = open_buffers(payload, "payload", PyBUF_SIMPLE);
  std::vector<Frame> frames;
  frames.reserve(opened.size());
  for (const Bytes& frame : opened) frames.push_back({frame.data(), frame.size()});
  return sender.send(reinterpret_cast<void*>(socket), {to.data(), to.size()},
                     {head.data(), head.size()}, frames, copies, ticket);
}

// Returns the request id and the keys after `prefix`; None for any other header and for a request
// that is not for one to `most` keys of `width` bytes.
py::object read_get(const py::buffer& header, const py::bytes& prefix, size_t width, size_t most) {
  const Bytes bytes(header, "header");
  const auto found = read_get_header({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (!found || found->request_id == 0 || found->width != width) return py::none();
  const size_t count = found->keys.size() / width;
  if (count == 0 || count > most) return py::none();
  const std::string_view before(prefix);
  py::list keys(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* key = PyBytes_FromStringAndSize(nullptr, py::ssize_t(before.size() + width));
    if (key == nullptr) throw py::error_already_set();
    char* into = PyBytes_AS_STRING(key);
    std::memcpy(into, before.data(), before.size());
    std::memcpy(into + before.size(), found->keys.data() + i * width, width);
    PyList_SET_ITEM(keys.ptr(), py::ssize_t(i), key);
  }
  return py::make_tuple(found->request_id, keys);
}

// Attributes of the blocks of a reply.
struct BlockNames {
  PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* const checksum = PyUnicode_InternFromString("checksum");
  PyObject* const view = PyUnicode_InternFromString("view");
};

const BlockNames& block_names() {
  static const BlockNames names;
  return names;
}

uint64_t unsigned_attribute(const py::handle& object, PyObject* name) {
  const uint64_t value = PyLong_AsUnsignedLongLong(py::getattr(object, name).ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

struct GetReply {
  std::string header;
  uint64_t payload_bytes = 0;
};

// Returns nothing if a block has a length that is not in the set `allowed`.
std::optional<GetReply> get_reply(uint64_t request_id, const py::list& blocks,
                                  const py::anyset& allowed) {
  const BlockNames& names = block_names();
  const size_t count = blocks.size();
  if (count > kMaxReplyBlocks) throw ArgumentError("blocks", std::to_string(count) + " blocks");
  std::vector<uint64_t> lengths(count), checksums(count);
  GetReply reply;
  for (size_t i = 0; i < count; ++i) {
    const py::object block = blocks[i];
    if (!allowed.contains(py::getattr(block, names.nbytes))) return std::nullopt;
    lengths[i] = unsigned_attribute(block, names.nbytes);
    checksums[i] = unsigned_attribute(block, names.checksum);
    reply.payload_bytes += lengths[i];
  }
  reply.header = write_get_reply(request_id, lengths, checksums);
  return reply;
}

// Returns the header of the reply with all of these blocks, and their length in all; None if one
// has a length that is not in the set `allowed`.
py::object pack_get_reply(uint64_t request_id, const py::list& blocks, const py::anyset& allowed) {
  const std::optional<GetReply> reply = get_reply(request_id, blocks, allowed);
  if (!reply) return py::none();
  return py::make_tuple(py::bytes(reply->header), reply->payload_bytes);
}

// Sends the reply with copies of all of these blocks. Returns how many bytes were sent: none if zmq
// refuses the message or a block has a length that is not in the set `allowed`. Keeps the GIL, as
// `send_message` does.
uint64_t send_get_reply(ZmqSender& sender, uintptr_t socket, const py::bytes& identity,
                        uint64_t request_id, const py::list& blocks, const py::anyset& allowed,
                        uint64_t ticket) {
  if (socket == 0) throw ArgumentError("socket", "a null address");
  std::optional<GetReply> reply = get_reply(request_id, blocks, allowed);
  if (!reply) return 0;
  std::deque<Bytes> opened;
  std::vector<Frame> frames;
  uint64_t sent = reply->header.size();
  for (const py::handle block : blocks) {
    const Bytes& frame = opened.emplace_back(py::getattr(block, block_names().view), "view");
    frames.push_back({frame.data(), frame.size()});
    sent += frame.size();
  }
  const Bytes to(identity);
  auto* const header = reinterpret_cast<uint8_t*>(reply->header.data());
  const int error = sender.send(reinterpret_cast<void*>(socket), {to.data(), to.size()},
                                {header, reply->header.size()}, frames, true, ticket);
  return error == 0 ? sent : 0;
}

// Follows a linked list up to `last` or None and returns one attribute of each object.
py::list follow(py::object at, const py::object& last, const py::str& next, const py::str& wanted,
                int64_t most) {
  py::list found;
  for (int64_t i = 0; i < most && !at.is(last) && !at.is_none(); ++i) {
    found.append(py::getattr(at, wanted));
    at = py::getattr(at, next);
  }
  return found;
}

// Source and target buffers, which stay exported for the lifetime of this object.
struct Pairs {
  Pairs(const py::sequence& places, const py::sequence& sources)
      : into(open_buffers(places, "into", PyBUF_WRITABLE)),
        from(open_buffers(sources, "sources", PyBUF_SIMPLE)) {
    if (into.size() != from.size())
      throw ArgumentError(
          "sources", std::to_string(from.size()) + " buffers for " + std::to_string(into.size()));
    for (size_t i = 0; i < into.size(); ++i) {
      const std::string name = "into[" + std::to_string(i) + "]";
      if (into[i].size() != from[i].size())
        throw ArgumentError(
            name, std::to_string(into[i].size()) + " bytes for " + std::to_string(from[i].size()));
      if (into[i].data() < from[i].data() + from[i].size() &&
          from[i].data() < into[i].data() + into[i].size())
        throw ArgumentError(name, "overlaps its source");
    }
  }
  std::deque<Bytes> into, from;
};

std::vector<uint64_t> copy_and_hash(const py::sequence& into, const py::sequence& sources,
                                    int64_t threads) {
  const Pairs pairs(into, sources);
  const int count = threads_for(pairs.from, threads);
  std::vector<uint64_t> sums(pairs.into.size());
  const py::gil_scoped_release no_gil;
  parallel_for(sums.size(), count, [&](size_t i) {
    sums[i] = copy_xxh3_64(pairs.into[i].data(), pairs.from[i].data(), pairs.from[i].size());
  });
  return sums;
}

// Fills together with the buffers they use. The GIL guards all members except `fills_`.
class FillPool {
 public:
  FillPool() = default;
  FillPool(const FillPool&) = delete;
  FillPool& operator=(const FillPool&) = delete;
  ~FillPool() { wait(); }

  int descriptor() const { return fills_.descriptor(); }

  void start(uint64_t ticket, const py::sequence& into, const py::sequence& sources,
             int64_t threads) {
    if (ticket <= last_)
      throw ArgumentError("ticket", std::to_string(ticket) + " after " + std::to_string(last_));
    const int most = thread_count(threads);
    const auto [entry, _] =
        pairs_.emplace(std::piecewise_construct, std::forward_as_tuple(ticket),
                       std::forward_as_tuple(into, sources));  // opens the buffers
    const Pairs& pairs = entry->second;
    std::vector<Fill> fills;
    uint64_t total = 0;
    for (size_t i = 0; i < pairs.into.size(); ++i) {
      fills.push_back({pairs.into[i].data(), pairs.from[i].data(), pairs.from[i].size()});
      total += pairs.from[i].size();
    }
    last_ = ticket;
    // The number of helpers depends on the bytes, because waking a helper takes time.
    fills_.start(ticket, fills, int(std::min<uint64_t>(total / kSerialBytes + 1, uint64_t(most))));
  }

  std::vector<std::pair<uint64_t, std::vector<uint64_t>>> collect() {
    std::vector<std::pair<uint64_t, std::vector<uint64_t>>> collected;
    for (Filled& filled : fills_.collect()) {
      pairs_.erase(filled.ticket);
      collected.emplace_back(filled.ticket, std::move(filled.checksums));
    }
    return collected;
  }

  void wait() const {
    PyThreadState* const state = PyEval_SaveThread();  // py::gil_scoped_release could throw here
    fills_.wait();
    PyEval_RestoreThread(state);
  }

 private:
  std::map<uint64_t, Pairs> pairs_;  // by ticket
  uint64_t last_ = 0;
  Fills fills_;
};

// Returns two lists: bytes moved or a negative errno of each block, and its checksum.
py::tuple outcomes(const std::vector<FileBlock>& blocks) {
  const py::list moved(blocks.size());
  const py::list checksums(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    moved[i] = blocks[i].moved;
    checksums[i] = blocks[i].checksum;
  }
  return py::make_tuple(moved, checksums);
}

std::vector<FileBlock> file_blocks(const py::object& offsets, const std::deque<Bytes>& buffers,
                                   const std::string& name) {
  const std::vector<int64_t> starts = to_vector<int64_t>(offsets, "offsets");
  if (starts.size() != buffers.size())
    throw ArgumentError(name, std::to_string(buffers.size()) + " buffers for " +
                                  std::to_string(starts.size()) + " offsets");
  std::vector<FileBlock> blocks;
  blocks.reserve(starts.size());
  for (size_t i = 0; i < starts.size(); ++i) {
    if (starts[i] < 0)
      throw ArgumentError("offsets[" + std::to_string(i) + "]",
                          std::to_string(starts[i]) + " is negative");
    blocks.push_back({buffers[i].data(), buffers[i].size(), starts[i]});
  }
  return blocks;
}

py::tuple read_file_blocks(int fd, const py::object& offsets, const py::sequence& into,
                           int64_t threads) {
  const std::deque<Bytes> buffers = open_buffers(into, "into", PyBUF_WRITABLE);
  std::vector<FileBlock> blocks = file_blocks(offsets, buffers, "into");
  const int count = thread_count(threads);
  {
    const py::gil_scoped_release no_gil;
    read_blocks(fd, blocks, count);
  }
  return outcomes(blocks);
}

py::tuple write_file_blocks(int fd, const py::object& offsets, const py::sequence& sources,
                            const py::sequence& expected, int64_t threads) {
  const std::deque<Bytes> buffers = open_buffers(sources, "sources", PyBUF_SIMPLE);
  std::vector<FileBlock> blocks = file_blocks(offsets, buffers, "sources");
  if (expected.size() != blocks.size())
    throw ArgumentError("expected", std::to_string(expected.size()) + " checksums for " +
                                        std::to_string(blocks.size()) + " blocks");
  for (size_t i = 0; i < blocks.size(); ++i)
    if (!expected[i].is_none()) blocks[i].expected = expected[i].cast<uint64_t>();
  const int count = thread_count(threads);
  {
    const py::gil_scoped_release no_gil;
    write_blocks(fd, blocks, count);
  }
  return outcomes(blocks);
}

py::bytes sha256_buffer(const py::buffer& data) {
  const Bytes bytes(data);
  uint8_t digest[kSha256Bytes];
  {
    const py::gil_scoped_release no_gil;
    sha256(bytes.data(), bytes.size(), digest);
  }
  return py::bytes(reinterpret_cast<const char*>(digest), kSha256Bytes);
}

Extras read_extras(const py::object& extras, size_t blocks) {
  Extras read;
  if (extras.is_none()) return read;
  if (!py::isinstance<py::dict>(extras)) throw ArgumentError("extras", "not a dict");
  for (const auto& entry : py::reinterpret_borrow<py::dict>(extras)) {
    if (!PyLong_Check(entry.first.ptr())) throw ArgumentError("extras", "a key is not an int");
    int overflow = 0;
    const long long index = PyLong_AsLongLongAndOverflow(entry.first.ptr(), &overflow);
    if (!PyBytes_Check(entry.second.ptr()))
      throw ArgumentError("extras[" + std::to_string(index) + "]", "not bytes");
    if (overflow != 0 || index < 0 || size_t(index) >= blocks) continue;
    const std::string_view value(PyBytes_AS_STRING(entry.second.ptr()),
                                 size_t(PyBytes_GET_SIZE(entry.second.ptr())));
    if (value.size() > UINT32_MAX)
      throw ArgumentError("extras[" + std::to_string(index) + "]", "longer than 4 GiB");
    read.emplace(size_t(index), value);
  }
  return read;
}

py::tuple extend_keys(const py::bytes& parent, const py::object& tokens, int64_t start,
                      int64_t stop, int64_t block_size, const py::object& extras,
                      const py::bytes& suffix) {
  const std::string_view before(parent);
  const std::string_view after(suffix);
  if (before.size() != kSha256Bytes)
    throw ArgumentError("parent", std::to_string(before.size()) + " bytes, expected 32");
  if (block_size < 1)
    throw ArgumentError("block_size", std::to_string(block_size) + " is not positive");
  if (stop >= start && (stop - start) % block_size != 0)
    throw ArgumentError("stop", std::to_string(start) + " to " + std::to_string(stop) +
                                    " is not a whole number of blocks of " +
                                    std::to_string(block_size));
  const std::vector<uint32_t> values = read_tokens(tokens, start, stop);
  const size_t blocks = values.size() / size_t(block_size);
  const Extras by_block = read_extras(extras, blocks);
  std::vector<uint8_t> digests;
  {
    const py::gil_scoped_release no_gil;
    digests = chain_digests(reinterpret_cast<const uint8_t*>(before.data()), values,
                            size_t(block_size), by_block);
  }
  py::list keys(blocks);
  for (size_t i = 0; i < blocks; ++i) {
    PyObject* key = PyBytes_FromStringAndSize(nullptr, py::ssize_t(kKeyHashBytes + after.size()));
    if (key == nullptr) throw py::error_already_set();
    char* bytes = PyBytes_AS_STRING(key);
    std::memcpy(bytes, digests.data() + i * kSha256Bytes, kKeyHashBytes);
    std::memcpy(bytes + kKeyHashBytes, after.data(), after.size());
    PyList_SET_ITEM(keys.ptr(), py::ssize_t(i), key);
  }
  if (blocks == 0) return py::make_tuple(keys, parent);
  const auto* last = reinterpret_cast<const char*>(digests.data()) + (blocks - 1) * kSha256Bytes;
  return py::make_tuple(keys, py::bytes(last, kSha256Bytes));
}

}  // namespace
}  // namespace tiered_kv

PYBIND11_MODULE(_cpu, module) {
  using namespace tiered_kv;
  translate_argument_errors();
  bind_index(module);

  py::class_<BlockLayout>(module, "BlockLayout")
      .def(py::init(&make_layout), py::arg("addresses"), py::arg("block_strides"),
           py::arg("run_bytes"), py::arg("slot_offsets"), py::arg("num_blocks"))
      .def_property_readonly("num_blocks", &BlockLayout::num_blocks)
      .def_property_readonly("num_runs", [](const BlockLayout& self) { return self.runs().size(); })
      .def_property_readonly("block_bytes", &BlockLayout::block_bytes);

  module.def("gather", &gather, py::arg("layout"), py::arg("block_ids"), py::arg("address"),
             py::arg("nbytes"), py::arg("slot_offsets"), py::arg("threads"));
  module.def("scatter", &scatter, py::arg("layout"), py::arg("block_ids"), py::arg("address"),
             py::arg("nbytes"), py::arg("slot_offsets"), py::arg("threads"));
  module.def("checksum", &checksum, py::arg("address"), py::arg("region_nbytes"),
             py::arg("offsets"), py::arg("nbytes"), py::arg("threads"));
  module.def("xxh3_64", &hash_buffer, py::arg("data"));
  module.def("hash_buffers", &hash_buffers, py::arg("buffers"), py::arg("threads"));
  module.def("follow", &follow, py::arg("first"), py::arg("last"), py::arg("next"),
             py::arg("wanted"), py::arg("most"));
  module.def("send_frames", &send_frames, py::arg("function"), py::arg("socket"),
             py::arg("buffers"), py::arg("flags"));
  py::class_<ZmqReceiver>(module, "ZmqReceiver")
      .def(py::init(&make_zmq_receiver), py::arg("socket"), py::arg("recv"), py::arg("msg_init"),
           py::arg("msg_recv"), py::arg("msg_data"), py::arg("msg_size"), py::arg("msg_more"),
           py::arg("msg_get"), py::arg("msg_gets"), py::arg("msg_close"))
      .def("receive", &receive_header, py::arg("most"))
      .def("drop", &drop_frames, py::arg("most"));
  py::class_<ZmqSender>(module, "ZmqSender")
      .def(py::init(&make_zmq_sender), py::arg("send"), py::arg("msg_init_data"),
           py::arg("msg_send"), py::arg("msg_close"))
      .def("send", &send_message, py::arg("socket"), py::arg("identity"), py::arg("header"),
           py::arg("payload"), py::arg("copies"), py::arg("ticket"))
      .def("send_get_reply", &send_get_reply, py::arg("socket"), py::arg("identity"),
           py::arg("request_id"), py::arg("blocks"), py::arg("allowed"), py::arg("ticket"))
      .def("take_sent", &ZmqSender::take_sent);
  module.attr("MAX_REPLY_BLOCKS") = kMaxReplyBlocks;
  module.def("read_get", &read_get, py::arg("header"), py::arg("prefix"), py::arg("width"),
             py::arg("most"));
  module.def("pack_get_reply", &pack_get_reply, py::arg("request_id"), py::arg("blocks"),
             py::arg("allowed"));
  module.def("copy_and_hash", &copy_and_hash, py::arg("into"), py::arg("sources"),
             py::arg("threads"));
  py::class_<FillPool>(module, "FillPool")
      .def(py::init<>())
      .def_property_readonly("descriptor", &FillPool::descriptor)
      .def("start", &FillPool::start, py::arg("ticket"), py::arg("into"), py::arg("sources"),
           py::arg("threads"))
      .def("collect", &FillPool::collect)
      .def("wait", &FillPool::wait);
  module.def("read_file_blocks", &read_file_blocks, py::arg("fd"), py::arg("offsets"),
             py::arg("into"), py::arg("threads"));
  module.def("write_file_blocks", &write_file_blocks, py::arg("fd"), py::arg("offsets"),
             py::arg("sources"), py::arg("expected"), py::arg("threads"));
  module.def("sha256", &sha256_buffer, py::arg("data"));
  module.def("extend_keys", &extend_keys, py::arg("parent"), py::arg("tokens"), py::arg("start"),
             py::arg("stop"), py::arg("block_size"), py::arg("extras"), py::arg("suffix"));
  module.def("_force_portable", [](bool on) { force_portable.store(on); }, py::arg("on"));
}
