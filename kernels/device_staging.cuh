// How a step's arguments reach the device and its work space is kept: small helpers of
// device_cache_steps.cuh.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/device_cache.hpp"
#include "kernels/device_memory.cuh"

namespace kvreplay::kernels::device {

// Arrays that cross to the device in one copy. begin, put ..., send; `put` gives the address that
// the array will have there.
class upload_stage {
 public:
  static std::size_t room_for(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

  // bytes: at least the sum of room_for over what is put. The last send must have been passed.
  void begin(std::size_t bytes) {
    if (bytes > device_.size()) {
      device_ = device_buffer<std::byte>(bytes + bytes / 2, "the arguments of a step");
    }
    host_ = pinned_.room(device_.size());
    used_ = 0;
  }
  template <class T>
  T* put(const T* x, std::size_t n) {
    auto* target = reinterpret_cast<T*>(device_.get() + used_);
    if (n > 0) std::memcpy(host_ + used_, x, n * sizeof(T));
    used_ += room_for(n * sizeof(T));
    return target;
  }
  template <class T>
  const T* put(const std::vector<T>& x) {
    return put(x.data(), x.size());
  }
  void send(simt::stream_type stream) { copy_async(device_.get(), host_, used_, stream); }

 private:
  pinned_memory pinned_;
  device_buffer<std::byte> device_{0};
  std::byte* host_ = nullptr;
  std::size_t used_ = 0;
};

// Work space that grows with the longest step.
template <class T>
class scratch_array {
 public:
  // Growing waits for the stream, whose kernels may still use the old one.
  T* room(std::int64_t n, const char* what, simt::stream_type stream) {
    const auto wanted = static_cast<std::size_t>(n);
    if (wanted > data_.size()) {
      wait_for(stream);
      data_ = device_buffer<T>(0);
      data_ = device_buffer<T>(wanted + wanted / 4, what);
    }
    return data_.get();
  }
  std::int64_t bytes() const { return static_cast<std::int64_t>(data_.size() * sizeof(T)); }

 private:
  device_buffer<T> data_{0};
};

// Runs launches, timed where somebody listens.
class timed_stream {
 public:
  simt::stream_type get() const { return stream_.get(); }
  void listen(kernel_clock clock) { clock_ = std::move(clock); }
  template <class Launch>
  void run(std::string_view name, Launch launch) {
    if (!clock_) return launch(stream_.get());
    lap& mark = next_lap();
    mark.name = name;
    mark.begin.set(stream_.get());
    launch(stream_.get());
    mark.end.set(stream_.get());
  }
  // Until everything so far is done; then the clock is told.
  void wait() {
    stream_.wait();
    for (std::size_t i = 0; i < used_; ++i) {
      if (clock_) clock_(laps_[i].name, laps_[i].end.since(laps_[i].begin));
    }
    used_ = 0;
  }

 private:
  struct lap {
    std::string_view name;
    time_mark begin, end;
  };
  lap& next_lap() {
    if (used_ == laps_.size()) laps_.emplace_back();
    return laps_[used_++];
  }
  device_stream stream_;
  kernel_clock clock_;
  std::vector<lap> laps_;
  std::size_t used_ = 0;
};

}  // namespace kvreplay::kernels::device
