#include "zmq_sender.h"

#include <atomic>
#include <cerrno>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

namespace tiered_kv {
namespace {

constexpr int kDontWait = 1;  // ZMQ_DONTWAIT
constexpr int kMore = 2;      // ZMQ_SNDMORE

}  // namespace

// Shared with the messages in zmq, which may outlive the sender.
struct ZmqSender::Sent {
  // One message with frames that zmq refers to. It deletes itself when zmq has dropped them all.
  struct Message {
    std::shared_ptr<Sent> sent;
    uint64_t ticket = 0;
    std::atomic<size_t> frames;
    std::string header;  // if that is the frame which zmq refers to

    static void drop(Message* message, size_t frames) {
      if (message->frames.fetch_sub(frames) != frames) return;
      message->sent->report(message->ticket);
      delete message;
    }
    static void release(void* /*data*/, void* hint) { drop(static_cast<Message*>(hint), 1); }
  };

  // Reserves memory so that `report` never allocates: a thread of zmq cannot handle a failure.
  void expect() {
    const std::lock_guard<std::mutex> lock(mutex);
    tickets.reserve(tickets.size() + expected + 1);
    ++expected;
  }

  void refused() {
    const std::lock_guard<std::mutex> lock(mutex);
    --expected;
  }

  void report(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex);
    --expected;
    tickets.push_back(ticket);
  }

  std::vector<uint64_t> take() {
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<uint64_t> taken(tickets);
    tickets.clear();  // keeps the reserved memory
    return taken;
  }

  std::mutex mutex;
  std::vector<uint64_t> tickets;
  size_t expected = 0;  // messages that are not reported yet
};

ZmqSender::ZmqSender(const ZmqFunctions& functions)
    : zmq_(functions), sent_(std::make_shared<Sent>()) {}

int ZmqSender::send(void* socket, const Frame& identity, const Frame& header,
                    const std::vector<Frame>& payload, bool copies, uint64_t ticket) {
  const size_t count = payload.size();
  const bool refers_to_header = ticket != 0 && (copies || count == 0);
  size_t left = ticket == 0 ? 0 : refers_to_header ? 1 : count;  // frames to refer to
  std::unique_ptr<Sent::Message> owned;
  if (ticket != 0) {
    owned.reset(new Sent::Message{sent_, ticket, {left}, {}});
    if (refers_to_header)
      owned->header.assign(reinterpret_cast<const char*>(header.data), header.size);
    sent_->expect();
  }
  const auto send = [&](const Frame& frame, int flags) {
    int sent = 0;
    do {  // a signal may interrupt zmq
      sent = zmq_.send(socket, frame.data, frame.size, flags);
    } while (sent < 0 && errno == EINTR);
    return sent;
  };
  // zmq accepts or refuses the whole message at this frame.
  if (send(identity, kDontWait | kMore) < 0) {
    const int error = errno;
    if (owned) sent_->refused();
    return error;
  }
  Sent::Message* const message = owned.release();
  const auto fail = [&] {
    const int error = errno;
    if (left > 0) Sent::Message::drop(message, left);
    throw std::system_error(error, std::generic_category(), "zmq failed within a message");
  };
  const auto copy = [&](const Frame& frame, int flags) {
    if (send(frame, flags) < 0) fail();
  };
  const auto refer = [&](void* data, size_t size, int flags) {
    alignas(void*) unsigned char frame[64];  // a zmq_msg_t
    if (zmq_.msg_init_data(frame, data, size, &Sent::Message::release, message) < 0) fail();
    --left;  // from here on zmq drops it
    int sent = 0;
    do {
      sent = zmq_.msg_send(frame, socket, flags);
    } while (sent < 0 && errno == EINTR);
    if (sent >= 0) return;
    const int error = errno;
    zmq_.msg_close(frame);
    errno = error;
    fail();
  };
  const int flags = kDontWait | (count == 0 ? 0 : kMore);
  if (refers_to_header)
    refer(message->header.data(), message->header.size(), flags);
  else
    copy(header, flags);
  for (size_t i = 0; i < count; ++i) {
    const int last = kDontWait | (i + 1 < count ? kMore : 0);
    if (copies)
      copy(payload[i], last);
    else
      refer(payload[i].data, payload[i].size, last);
  }
  return 0;
}

std::vector<uint64_t> ZmqSender::take_sent() { return sent_->take(); }

}  // namespace tiered_kv
