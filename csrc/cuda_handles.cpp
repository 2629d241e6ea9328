#include "cuda_handles.h"

#include <dlfcn.h>

#include "block_layout.h"

namespace tiered_kv {
namespace {

std::string text(cudaError_t status) {
  return std::string(cudaGetErrorString(status)) + " (" + cudaGetErrorName(status) + ")";
}

// Two functions of the driver API that the runtime API does not have.
struct Driver {
  int (*get_context)(void**) = nullptr;
  int (*set_context)(void*) = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) return;
    get_context = reinterpret_cast<int (*)(void**)>(dlsym(library, "cuCtxGetCurrent"));
    set_context = reinterpret_cast<int (*)(void*)>(dlsym(library, "cuCtxSetCurrent"));
  }
};

const Driver& driver() {
  static const Driver instance;
  return instance;
}

[[noreturn]] void closed(const char* what) { throw ArgumentError(what, "is closed"); }

// For destructors, which may run while the process unloads CUDA; errors do not matter then.
template <typename Handle>
void close_quietly(Handle& handle) {
  try {
    handle.close();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that a later call does not report it
  if (status == cudaErrorInsufficientDriver) {
    // The runtime returns the same status if no driver is installed.
    int version = 0;
    cudaDriverGetVersion(&version);
    if (version == 0) throw NoDevice("no CUDA device: no NVIDIA driver is installed");
  }
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver ||
      status == cudaErrorStubLibrary)
    throw NoDevice("no CUDA device: " + text(status));
  throw CudaFailure(std::string(call) + ": " + text(status));
}

int device_count() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count == 0) throw NoDevice("no CUDA device: the driver reports none");
  return count;
}

DeviceGuard::DeviceGuard(int device) : active_(device != kCurrentDevice) {
  if (active_) {
    const int count = device_count();
    if (device < 0 || device >= count)
      throw ArgumentError("device",
                          std::to_string(device) + " is not in [0, " + std::to_string(count) + ")");
    if (driver().get_context != nullptr && driver().get_context(&before_) != 0) before_ = nullptr;
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  cudaThreadExchangeStreamCaptureMode(&capture_mode_);
}

DeviceGuard::~DeviceGuard() {
  cudaThreadExchangeStreamCaptureMode(&capture_mode_);
  if (active_ && driver().set_context != nullptr) driver().set_context(before_);
}

void host_register(int device, int64_t address, int64_t nbytes) {
  checked_range("address", address, nbytes);
  if (nbytes == 0) throw ArgumentError("nbytes", "0 is not positive");
  const DeviceGuard guard(device);
  void* const memory = reinterpret_cast<void*>(address);
  check(cudaHostRegister(memory, size_t(nbytes), cudaHostRegisterPortable | cudaHostRegisterMapped),
        "cudaHostRegister");
  void* mapped = nullptr;
  const cudaError_t status = cudaHostGetDevicePointer(&mapped, memory, 0);
  if (status == cudaSuccess && mapped == memory) return;
  cudaHostUnregister(memory);
  check(status, "cudaHostGetDevicePointer");
  throw CudaFailure("cudaHostGetDevicePointer: the device maps the memory at another address");
}

void host_unregister(int device, int64_t address) {
  checked_range("address", address, 1);
  const DeviceGuard guard(device);
  check(cudaHostUnregister(reinterpret_cast<void*>(address)), "cudaHostUnregister");
}

Stream::Stream(int device, bool low_priority) : device_(device) {
  const DeviceGuard guard(device);
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                     low_priority ? lowest : highest),
        "cudaStreamCreateWithPriority");
}

Stream::~Stream() { close_quietly(*this); }

uint64_t Stream::handle() const {
  if (stream_ == nullptr) closed("stream");
  return reinterpret_cast<uint64_t>(stream_);
}

void Stream::wait(const Event& event) {
  const cudaStream_t stream = to_stream(handle());
  const DeviceGuard guard(device_);
  check(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent");
}

void Stream::synchronize() {
  const cudaStream_t stream = to_stream(handle());
  const DeviceGuard guard(device_);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void Stream::close() {
  if (stream_ == nullptr) return;
  const cudaStream_t stream = stream_;
  stream_ = nullptr;
  const DeviceGuard guard(device_);
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

Event::Event(int device) : device_(device) {
  const DeviceGuard guard(device);
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

Event::~Event() { close_quietly(*this); }

cudaEvent_t Event::get() const {
  if (event_ == nullptr) closed("event");
  return event_;
}

void Event::record(uint64_t stream_handle) {
  const cudaEvent_t event = get();
  const DeviceGuard guard(device_);
  check(cudaEventRecord(event, to_stream(stream_handle)), "cudaEventRecord");
}

void Event::wait_in(uint64_t stream_handle) const {
  const cudaEvent_t event = get();
  const DeviceGuard guard(device_);
  check(cudaStreamWaitEvent(to_stream(stream_handle), event, 0), "cudaStreamWaitEvent");
}

bool Event::query() {
  const cudaEvent_t event = get();
  const DeviceGuard guard(device_);
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

void Event::synchronize() {
  const cudaEvent_t event = get();
  const DeviceGuard guard(device_);
  check(cudaEventSynchronize(event), "cudaEventSynchronize");
}

void Event::close() {
  if (event_ == nullptr) return;
  const cudaEvent_t event = event_;
  event_ = nullptr;
  const DeviceGuard guard(device_);
  check(cudaEventDestroy(event), "cudaEventDestroy");
}

DeviceBuffer::DeviceBuffer(int device, int64_t nbytes) : device_(device), nbytes_(nbytes) {
  if (nbytes <= 0) throw ArgumentError("nbytes", std::to_string(nbytes) + " is not positive");
  const DeviceGuard guard(device);
  const cudaError_t status = cudaMalloc(&memory_, size_t(nbytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    throw CudaFailure("cudaMalloc: requested " + std::to_string(nbytes) + " bytes, " +
                      std::to_string(free) + " free on device " + std::to_string(device) + ": " +
                      text(status));
  }
  check(status, "cudaMalloc");
}

DeviceBuffer::~DeviceBuffer() { close_quietly(*this); }

uint64_t DeviceBuffer::address() const {
  if (memory_ == nullptr) closed("buffer");
  return reinterpret_cast<uint64_t>(memory_);
}

void DeviceBuffer::close() {
  if (memory_ == nullptr) return;
  void* const memory = memory_;
  memory_ = nullptr;
  const DeviceGuard guard(device_);
  // Kernels may still use the memory, and CUDA does not guarantee that cudaFree waits for them.
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaFree(memory), "cudaFree");
}

}  // namespace tiered_kv
