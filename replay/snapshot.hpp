// snapshot: arrays and numbers to bytes and back, in the order in which they are visited.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kvreplay::replay {

// A snapshot that is cut short or does not fit. The run then starts from the beginning.
class snapshot_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class snapshot_writer {
 public:
  template <class T>
  void operator()(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  template <class T>
  void operator()(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    (*this)(static_cast<std::uint64_t>(values.size()));
    (*this)(static_cast<std::uint64_t>(values.capacity()));  // reserved_bytes counts it
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  void operator()(const std::string& text) {
    (*this)(static_cast<std::uint64_t>(text.size()));
    bytes_ += text;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class snapshot_reader {
 public:
  explicit snapshot_reader(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  void operator()(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(static_cast<void*>(&value), take(sizeof value), sizeof value);
  }
  template <class T>
  void operator()(std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::uint64_t count = size(sizeof(T));
    std::uint64_t capacity = 0;
    (*this)(capacity);
    if (capacity < count || capacity > (std::uint64_t{1} << 40) / sizeof(T)) {
      throw snapshot_error("a snapshot with an impossible capacity");
    }
    // In place where it fits: others may point there.
    if (values.size() != count || values.capacity() != capacity) {
      std::vector<T> fresh;
      fresh.reserve(capacity);
      fresh.resize(count);
      values.swap(fresh);
    }
    if (count > 0) std::memcpy(values.data(), take(count * sizeof(T)), count * sizeof(T));
  }
  void operator()(std::string& text) {
    const std::uint64_t count = size(1);
    text.assign(take(count), count);
  }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::uint64_t size(std::uint64_t each) {
    std::uint64_t count = 0;
    (*this)(count);
    if (count > bytes_.size() / each) throw snapshot_error("a snapshot that is cut short");
    return count;
  }
  const char* take(std::uint64_t count) {
    if (count > bytes_.size()) throw snapshot_error("a snapshot that is cut short");
    const char* at = bytes_.data();
    bytes_.remove_prefix(count);
    return at;
  }

  std::string_view bytes_;
};

}  // namespace kvreplay::replay
