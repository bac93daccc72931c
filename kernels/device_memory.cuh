// Memory, copies, streams and clocks of a device: CUDA with nvcc; with a host compiler aligned host
// memory and the emulator's immediate execution. What CUDA refuses is a simt::failure.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels/simt/simt.hpp"

namespace kvreplay::kernels::device {

#if defined(__CUDACC__)

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw simt::failure(std::string(what).append(": ").append(cudaGetErrorString(error)));
}
// Null where the device has no room.
inline void* try_allocate(std::size_t bytes) {
  void* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, bytes);
  if (error != cudaErrorMemoryAllocation) {
    require(error, "cudaMalloc");
    return p;
  }
  cudaGetLastError();  // a refused allocation is forgotten
  return nullptr;
}
inline void release(void* p) { cudaFree(p); }
inline std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  require(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}
inline void* allocate_pinned(std::size_t bytes) {
  void* p = nullptr;
  require(cudaMallocHost(&p, bytes), "cudaMallocHost");
  return p;
}
inline void release_pinned(void* p) { cudaFreeHost(p); }

// In the order of the stream; host memory has to be pinned to be copied beside other work.
inline void copy_async(void* to, const void* from, std::size_t bytes, simt::stream_type stream) {
  if (bytes == 0) return;
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copy");
}
inline void fill_async(void* p, std::size_t bytes, simt::stream_type stream) {
  require(cudaMemsetAsync(p, 1, bytes, stream), "fill");
}
inline void wait_for(simt::stream_type stream) {
  require(cudaStreamSynchronize(stream), "the device");
}
inline simt::stream_type open_stream() {
  cudaStream_t stream{};
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}
inline void close_stream(simt::stream_type stream) { cudaStreamDestroy(stream); }

// A point in a stream's time.
class time_mark {
 public:
  time_mark() { require(cudaEventCreate(&event_), "cudaEventCreate"); }
  time_mark(time_mark&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  time_mark(const time_mark&) = delete;
  time_mark& operator=(const time_mark&) = delete;
  ~time_mark() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  void set(simt::stream_type stream) {
    require(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  // Microseconds from an earlier mark; the stream must have passed both.
  double since(const time_mark& earlier) const {
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1000;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

#else

// What the emulated device has left, per thread; a test may set it.
inline std::size_t& free_memory() {
  static thread_local std::size_t bytes = std::numeric_limits<std::size_t>::max();
  return bytes;
}
inline void* try_allocate(std::size_t bytes) {
  if (bytes > free_memory()) return nullptr;
  void* p = ::operator new (bytes, std::align_val_t{256}, std::nothrow);
  if (p != nullptr) std::memset(p, 0xFF, bytes);  // NaN as FP32 and FP16
  return p;
}
inline void release(void* p) { ::operator delete (p, std::align_val_t{256}); }
inline void* allocate_pinned(std::size_t bytes) {
  return ::operator new (bytes, std::align_val_t{256});
}
inline void release_pinned(void* p) { ::operator delete (p, std::align_val_t{256}); }
inline void copy_async(void* to, const void* from, std::size_t bytes, simt::stream_type) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
// What the host's caches hold is no matter of the emulator's.
inline void fill_async(void*, std::size_t, simt::stream_type) {}
inline void wait_for(simt::stream_type) {}
inline simt::stream_type open_stream() { return {}; }
inline void close_stream(simt::stream_type) {}

class time_mark {
 public:
  void set(simt::stream_type) { at_ = std::chrono::steady_clock::now(); }
  double since(const time_mark& earlier) const {
    return std::chrono::duration<double, std::micro>(at_ - earlier.at_).count();
  }

 private:
  std::chrono::steady_clock::time_point at_;
};

#endif

inline std::string size_text(std::size_t bytes) {
  constexpr std::size_t mebibyte = std::size_t{1} << 20;
  std::string text = std::to_string((bytes + mebibyte - 1) / mebibyte);
  return text.append(" MiB");
}

// Throws simt::failure where the device has no room; `what` begins the sentence.
inline void* allocate(std::size_t bytes, const char* what = "a buffer") {
  void* p = try_allocate(bytes);
  if (p != nullptr) return p;
  throw simt::failure(std::string(what)
                          .append(" needs ")
                          .append(size_text(bytes))
                          .append(", the device has ")
                          .append(size_text(free_memory()))
                          .append(" free"));
}

inline void to_device(void* to, const void* from, std::size_t bytes) {
  copy_async(to, from, bytes, {});
  wait_for({});
}
// Waits for the kernels before it, so that their failures show here.
inline void from_device(void* to, const void* from, std::size_t bytes) {
  copy_async(to, from, bytes, {});
  wait_for({});
}

// n values on the device; never empty, so that its address is one.
template <class T>
class device_buffer {
 public:
  explicit device_buffer(std::size_t n, const char* what = "a buffer")
      : n_(n), data_(allocate((n + 1) * sizeof(T), what)) {}
  explicit device_buffer(const std::vector<T>& x) : device_buffer(x.size()) {
    if (n_ > 0) to_device(data_, x.data(), n_ * sizeof(T));
  }
  device_buffer(device_buffer&& other) noexcept
      : n_(other.n_), data_(std::exchange(other.data_, nullptr)) {}
  device_buffer& operator=(device_buffer&& other) noexcept {
    std::swap(n_, other.n_);
    std::swap(data_, other.data_);
    return *this;
  }
  device_buffer(const device_buffer&) = delete;
  device_buffer& operator=(const device_buffer&) = delete;
  ~device_buffer() {
    if (data_ != nullptr) release(data_);
  }
  T* get() const { return static_cast<T*>(data_); }
  std::size_t size() const { return n_; }
  std::vector<T> read() const {
    std::vector<T> x(n_);
    if (n_ > 0) from_device(x.data(), data_, n_ * sizeof(T));
    return x;
  }

 private:
  std::size_t n_;
  void* data_;
};

class device_stream {
 public:
  device_stream() : stream_(open_stream()) {}
  device_stream(const device_stream&) = delete;
  device_stream& operator=(const device_stream&) = delete;
  ~device_stream() { close_stream(stream_); }
  simt::stream_type get() const { return stream_; }
  void wait() const { wait_for(stream_); }

 private:
  simt::stream_type stream_;
};

// Host memory that the device copies from and to without the processor. Grows, never shrinks;
// growing loses what it held.
class pinned_memory {
 public:
  pinned_memory() = default;
  pinned_memory(const pinned_memory&) = delete;
  pinned_memory& operator=(const pinned_memory&) = delete;
  ~pinned_memory() {
    if (data_ != nullptr) release_pinned(data_);
  }
  std::byte* room(std::size_t bytes) {
    if (bytes > size_) {
      if (data_ != nullptr) release_pinned(data_);
      data_ = nullptr;
      data_ = static_cast<std::byte*>(allocate_pinned(bytes));
      size_ = bytes;
    }
    return data_;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvreplay::kernels::device
