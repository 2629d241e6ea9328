// Owning wrappers of streams, events and device memory, and registration of host memory.
//
// The CUDA runtime is linked statically. It shares the device's primary context with any other
// runtime in the process, so stream handles and addresses are valid in all of them.
#pragma once

#include <cuda_runtime_api.h>

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tiered_kv {

class CudaFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class NoDevice : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws CudaFailure with the name of the call, or NoDevice if there is no device or driver.
void check(cudaError_t status, const char* call);

// Returns at least 1; throws NoDevice if there is no device.
int device_count();

constexpr int kCurrentDevice = INT_MIN;

// Makes a device current in a scope; kCurrentDevice keeps the device of the thread. The destructor
// restores the driver's context instead of calling cudaSetDevice, which would create a context on a
// device that the thread never used.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const bool active_;
  void* before_ = nullptr;
  // vLLM captures CUDA graphs while this process pins memory. In CUDA's default mode, a potentially
  // unsafe call of any thread invalidates every running capture; in the relaxed mode it does not.
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;
};

// Pins memory for DMA by all devices and maps it at its host address, in the context of `device`.
void host_register(int device, int64_t address, int64_t nbytes);
void host_unregister(int device, int64_t address);

inline cudaStream_t to_stream(uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

class Event;

class Stream {
 public:
  // Creates a non-blocking stream of the lowest priority, or of the highest.
  Stream(int device, bool low_priority);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  uint64_t handle() const;
  void wait(const Event& event);
  void synchronize();
  void close();

 private:
  const int device_;
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(int device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  cudaEvent_t get() const;
  void record(uint64_t stream_handle);
  // Makes later work of a stream wait for the event; does not block the caller.
  void wait_in(uint64_t stream_handle) const;
  bool query();
  void synchronize();
  void close();

 private:
  const int device_;
  cudaEvent_t event_ = nullptr;
};

class DeviceBuffer {
 public:
  DeviceBuffer(int device, int64_t nbytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  uint64_t address() const;
  int64_t nbytes() const { return nbytes_; }
  void close();

 private:
  const int device_;
  const int64_t nbytes_;
  void* memory_ = nullptr;
};

}  // namespace tiered_kv
