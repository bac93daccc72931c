// A small RAII layer over the HDF5 C API. Every return value is checked; HDF5's own printed error
// stack is silenced and its innermost message is folded into one trace_error line. Debian's HDF5 is
// not thread-safe, so every call happens inside a `session`, which holds one process-wide mutex.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "traces/schema.hpp"

namespace kvreplay::traces::h5 {

// Holds the library's mutex and keeps HDF5 from printing; may nest in one thread.
class session {
 public:
  session();
  ~session();
  session(const session&) = delete;
  session& operator=(const session&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  H5E_auto2_t print_ = nullptr;
  void* print_data_ = nullptr;
};

// Throws trace_error "<where>: <what> (<HDF5's innermost message>)". Call inside a session.
[[noreturn]] void fail(std::string_view where, std::string_view what);

// An HDF5 identifier with the function that closes it.
class handle {
 public:
  using closer = herr_t (*)(hid_t);
  handle() = default;
  handle(hid_t id, closer close) : id_(id), close_(close) {}
  handle(handle&& other) noexcept;
  handle& operator=(handle&& other) noexcept;
  ~handle() { reset(); }

  hid_t get() const { return id_; }
  explicit operator bool() const { return id_ >= 0; }
  bool reset() noexcept;                 // false where HDF5 reported an error at the close
  void abandon() noexcept { id_ = -1; }  // leaves the object open until the process ends

 private:
  hid_t id_ = -1;
  closer close_ = nullptr;
};

enum class element { integer, float16, float32, float64, other };

handle float16_type();  // IEEE binary16, little endian: numpy's <f2

// `where` is "file" or "file: path"; it opens every message.
class dataset {
 public:
  dataset(hid_t parent, const std::string& name, std::string where);

  const std::string& where() const { return where_; }
  const std::vector<std::int64_t>& extents() const { return extents_; }
  element kind() const { return kind_; }
  const std::string& type_name() const { return type_name_; }  // for messages
  std::int64_t cache_bytes() const { return cache_bytes_; }    // of the chunk cache
  // Where fewer chunks exist than `rows` rows need: the row at which the first hole starts.
  std::optional<std::int64_t> first_unwritten(std::int64_t rows) const;

  // Rows [begin, begin + count) of dimension 0, and of the last of three dimensions only the first
  // `last` values where last >= 0. `out` must hold them. 16-bit floats come raw.
  void read(hid_t memory_type, std::int64_t begin, std::int64_t count, void* out,
            std::int64_t last = -1) const;
  void read_raw(std::int64_t begin, std::int64_t count, void* out, std::int64_t last = -1) const;
  std::vector<std::int64_t> read_integers(std::int64_t begin, std::int64_t count) const;
  std::int64_t row_values() const;  // values in one index of dimension 0

 private:
  std::int64_t first_hole(std::int64_t rows) const;
  void classify();
  void check_storage();
  void reopen_with_cache(hid_t parent, const std::string& name);
  void check_filters(hid_t properties, std::int64_t chunk_bytes) const;

  std::string where_, type_name_;
  handle id_, type_;
  std::vector<std::int64_t> extents_, chunk_;
  element kind_ = element::other;
  std::int64_t cache_bytes_ = 0;
};

class group {
 public:
  group(handle id, std::string where, bool is_root = false)
      : id_(std::move(id)), where_(std::move(where)), is_root_(is_root) {}

  hid_t id() const { return id_.get(); }
  const std::string& where() const { return where_; }
  std::string at(const std::string& name) const;  // where a child of that name stands
  bool has(const std::string& name) const;
  std::vector<std::string> children() const;
  group open(const std::string& name) const;
  dataset open_dataset(const std::string& name) const;

  bool has_attribute(const std::string& name) const;
  // Any integer type that holds the value; throws where it is outside [low, high].
  std::int64_t integer(const std::string& name, std::int64_t low, std::int64_t high) const;
  double real(const std::string& name) const;
  std::string text(const std::string& name) const;  // fixed or variable length

 private:
  handle open_attribute(const std::string& name) const;
  handle id_;
  std::string where_;
  bool is_root_ = false;
};

// Opens read-only and without a lock.
handle open_read_only(const std::string& path);
group root(hid_t file, const std::string& path);

}  // namespace kvreplay::traces::h5
