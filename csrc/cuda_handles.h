// Streams, events, device memory and host registration, each owned by one object.
//
// The CUDA runtime is linked statically and shares the device's primary context with any other
// runtime in the process, so stream handles and addresses pass freely between them.
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

// Throws CudaFailure, or NoDevice where there is no device or driver, with the call's name.
void check(cudaError_t status, const char* call);

// Throws NoDevice unless there is at least one.
int device_count();

constexpr int kCurrentDevice = INT_MIN;

// Makes a device current for a scope; kCurrentDevice leaves the thread's own. Restores the driver's
// context rather than the runtime's device number: cudaSetDevice would create a context on a
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
  // vLLM captures CUDA graphs while this process pins memory. In CUDA's default mode a call of any
  // thread that might be unsafe breaks every capture under way; in the relaxed mode it does not.
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;
};

// Pins memory for DMA by every device and maps it at its own address, in the context of `device`.
void host_register(int device, int64_t address, int64_t nbytes);
void host_unregister(int device, int64_t address);

inline cudaStream_t to_stream(uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

class Event;

class Stream {
 public:
  // Non-blocking. Low priority is the lowest there is, otherwise the highest.
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
  // Lets later work of any stream wait for this; the caller does not.
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
