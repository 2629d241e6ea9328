#include "zmq_receiver.h"

#include <cerrno>
#include <system_error>

namespace tiered_kv {
namespace {

constexpr int kDontWait = 1;          // ZMQ_DONTWAIT
constexpr int kSourceDescriptor = 2;  // ZMQ_SRCFD

// Returns the result of a call that a signal may interrupt, or -1 if there is nothing to receive.
template <typename Call>
int received(const Call& call) {
  int result = 0;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  if (result < 0 && errno != EAGAIN)
    throw std::system_error(errno, std::generic_category(), "cannot receive from zmq");
  return result;
}

}  // namespace

ZmqReceiver::ZmqReceiver(const ZmqReceiveFunctions& functions, void* socket)
    : zmq_(functions), socket_(socket) {}

ZmqReceiver::~ZmqReceiver() { release(); }

bool ZmqReceiver::receive() {
  release();
  if (!awaits_header_) {
    const int size =
        received([&] { return zmq_.recv(socket_, identity_, sizeof identity_, kDontWait); });
    if (size < 0) return false;
    if (size_t(size) > sizeof identity_)  // zmq has no longer ones
      throw std::system_error(EMSGSIZE, std::generic_category(), "an identity from zmq");
    identity_size_ = size_t(size);
    awaits_header_ = true;
  }
  zmq_.msg_init(header_);
  has_header_ = true;
  if (received([&] { return zmq_.msg_recv(header_, socket_, kDontWait); }) < 0) return false;
  awaits_header_ = false;
  return true;
}

bool ZmqReceiver::drop(size_t most, size_t& dropped, size_t& bytes) {
  bool follows = true;  // another frame
  alignas(void*) unsigned char frame[sizeof header_];
  for (dropped = bytes = 0; follows && dropped < most; ++dropped) {
    zmq_.msg_init(frame);
    int size = 0;
    try {
      size = received([&] { return zmq_.msg_recv(frame, socket_, kDontWait); });
    } catch (...) {
      zmq_.msg_close(frame);
      throw;
    }
    if (size >= 0) follows = zmq_.msg_more(frame) != 0;
    zmq_.msg_close(frame);
    if (size < 0) break;
    bytes += size_t(size);
  }
  return follows;
}

std::string_view ZmqReceiver::header() const {
  if (!has_header_) return {};
  return {static_cast<const char*>(zmq_.msg_data(header_)), zmq_.msg_size(header_)};
}

const char* ZmqReceiver::user() const {
  return has_header_ ? zmq_.msg_gets(header_, "User-Id") : nullptr;
}

int ZmqReceiver::descriptor() const {
  return has_header_ ? zmq_.msg_get(header_, kSourceDescriptor) : -1;
}

bool ZmqReceiver::has_more() const { return has_header_ && zmq_.msg_more(header_) != 0; }

void ZmqReceiver::release() {
  if (!has_header_) return;
  has_header_ = false;
  zmq_.msg_close(header_);
}

}  // namespace tiered_kv
