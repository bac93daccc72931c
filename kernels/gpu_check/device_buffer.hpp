// Memory of the device for the check program: cudaMalloc with nvcc, aligned host memory where the
// checks run on the host emulator.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "kernels/simt/simt.hpp"

namespace kvreplay::kernels::gpu_check {

#if defined(__CUDACC__)

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw simt::failure(std::string(what) + ": " + cudaGetErrorString(error));
}
inline void* allocate(std::size_t bytes) {
  void* p = nullptr;
  require(cudaMalloc(&p, bytes), "cudaMalloc");
  return p;
}
inline void release(void* p) { cudaFree(p); }
inline void to_device(void* to, const void* from, std::size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
}
// Waits for the kernels before it, so that their failures show here.
inline void from_device(void* to, const void* from, std::size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the device");
}

#else

inline void* allocate(std::size_t bytes) { return ::operator new (bytes, std::align_val_t{256}); }
inline void release(void* p) { ::operator delete (p, std::align_val_t{256}); }
inline void to_device(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
inline void from_device(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

#endif

// n values on the device; never empty, so that its address is one.
template <class T>
class device_buffer {
 public:
  explicit device_buffer(std::size_t n) : n_(n), data_(allocate((n + 1) * sizeof(T))) {}
  explicit device_buffer(const std::vector<T>& x) : device_buffer(x.size()) {
    if (n_ > 0) to_device(data_, x.data(), n_ * sizeof(T));
  }
  device_buffer(device_buffer&& other) noexcept : n_(other.n_), data_(other.data_) {
    other.data_ = nullptr;
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

}  // namespace kvreplay::kernels::gpu_check
