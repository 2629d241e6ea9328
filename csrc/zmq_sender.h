// Sends messages of libzmq without copying their payload and reports when zmq has sent them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tiered_kv {

// Functions of the libzmq that made the sockets. They are passed in instead of linked, because
// pyzmq brings a libzmq of its own.
struct ZmqFunctions {
  int (*send)(void* socket, const void* data, size_t size, int flags);
  int (*msg_init_data)(void* message, void* data, size_t size, void (*release)(void*, void*),
                       void* hint);
  int (*msg_send)(void* message, void* socket, int flags);
  int (*msg_close)(void* message);
};

struct Frame {
  uint8_t* data;
  size_t size;
};

// Used by one thread, while zmq's threads report what they have sent.
class ZmqSender {
 public:
  explicit ZmqSender(const ZmqFunctions& functions);

  // Sends one message over a ROUTER socket without waiting. Returns 0, or the errno with which zmq
  // refused it; then nothing was sent. With a ticket, `take_sent` reports it once zmq is done with
  // the message. The payload is copied, or must stay valid until then; a payload that is not copied
  // needs a ticket. Throws std::system_error if zmq fails within a message.
  int send(void* socket, const Frame& identity, const Frame& header,
           const std::vector<Frame>& payload, bool copies, uint64_t ticket);

  // Returns the tickets of the messages that zmq was done with since the last call.
  std::vector<uint64_t> take_sent();

 private:
  struct Sent;
  const ZmqFunctions zmq_;
  const std::shared_ptr<Sent> sent_;
};

}  // namespace tiered_kv
