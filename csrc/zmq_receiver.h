// Receives identity and header of messages of a ROUTER socket of libzmq.
#pragma once

#include <cstddef>
#include <string_view>

namespace tiered_kv {

// Functions of the libzmq that made the socket; see ZmqFunctions.
struct ZmqReceiveFunctions {
  int (*recv)(void* socket, void* data, size_t size, int flags);
  int (*msg_init)(void* message);
  int (*msg_recv)(void* message, void* socket, int flags);
  void* (*msg_data)(void* message);
  size_t (*msg_size)(const void* message);
  int (*msg_more)(const void* message);
  int (*msg_get)(const void* message, int property);
  const char* (*msg_gets)(const void* message, const char* property);
  int (*msg_close)(void* message);
};

// Used by the thread of its socket. Frames after the header are received from the socket itself.
class ZmqReceiver {
 public:
  ZmqReceiver(const ZmqReceiveFunctions& functions, void* socket);
  ZmqReceiver(const ZmqReceiver&) = delete;
  ZmqReceiver& operator=(const ZmqReceiver&) = delete;
  ~ZmqReceiver();

  // Receives identity and header of the next message without waiting. Returns whether there is one.
  // Throws std::system_error if zmq fails.
  bool receive();

  // What was received, until `release`. All are empty before.
  std::string_view identity() const { return {identity_, identity_size_}; }
  std::string_view header() const;
  const char* user() const;  // public key of an authenticated client; nullptr for others
  int descriptor() const;    // of the connection; negative if it has none
  bool has_more() const;     // frames after the header

  // Drops up to `most` frames after the header, without waiting. They are counted in `dropped`.
  // Call it while frames follow; returns whether more do.
  bool drop(size_t most, size_t& dropped, size_t& bytes);

  // Frees the header. `receive` does so, too.
  void release();

 private:
  const ZmqReceiveFunctions zmq_;
  void* const socket_;
  char identity_[255] = {};
  size_t identity_size_ = 0;
  bool awaits_header_ = false;
  bool has_header_ = false;
  alignas(void*) mutable unsigned char header_[64] = {};  // a zmq_msg_t
};

}  // namespace tiered_kv
