// Reading safetensors: one file, or an index with shards. Headers are hostile until checked.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tracer/config.hpp"

namespace kvreplay::tracer {

struct tensor_entry {
  std::string file, dtype;  // "F32", "F16", "BF16", or another (skipped unless asked for)
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // absolute byte range in the file
};

// All tensors of a directory. With model.safetensors.index.json the index decides: every mapped
// tensor must be in its mapped file, unlisted ones are ignored with a note, other files too.
// Without it all *.safetensors files of the folder count, and a tensor in two of them is an error.
// A header padded with NUL bytes is refused, as the format's own reader refuses it.
class tensor_store {
 public:
  explicit tensor_store(const std::string& directory, std::vector<std::string>* notes = nullptr);
  bool has(const std::string& name) const;
  const tensor_entry& entry(const std::string& name) const;  // throws model_error
  const std::map<std::string, tensor_entry>& entries() const { return entries_; }
  // Widened exactly to float. Throws where the shape differs from `expected`, the dtype is not
  // F32, F16 or BF16, or the file is shorter than its header says.
  std::vector<float> read(const std::string& name, const std::vector<std::int64_t>& expected) const;
  // The same into `out`, which holds as many values as `expected` says.
  void read_into(const std::string& name, const std::vector<std::int64_t>& expected,
                 std::span<float> out) const;
  // The first n raw bytes, for fingerprints.
  std::string first_bytes(const std::string& name, std::size_t n) const;

 private:
  std::map<std::string, tensor_entry> entries_;
};

}  // namespace kvreplay::tracer
