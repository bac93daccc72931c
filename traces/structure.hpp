// The structure of a kvtrace file, read and validated at open: names, types, ranks, extents,
// attributes, gaps. Internal to traces/.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "traces/hdf5.hpp"
#include "traces/reader.hpp"

namespace kvreplay::traces {

struct layer_entry {
  std::string path;  // as spelled in the file
  layer_info info;
  std::vector<std::int32_t> attn_pos;  // cut to n_tokens
};

struct sequence_entry {
  sequence_info info;
  std::string path;
  std::map<int, layer_entry> layers;  // by layer number
};

struct structure {
  bool complete = true;
  std::string producer, created;
  model_info model;
  std::map<int, std::string> wo_paths;  // by layer number
  std::vector<sequence_entry> sequences;
};

// Throws trace_error at the first broken rule. `file_bytes` bounds what extents may claim.
structure read_structure(const h5::group& root, const open_options& options,
                         std::int64_t file_bytes);

// Children whose names are decimal numbers, in numeric order; other names are ignored. Two
// spellings of one number are an error.
std::map<int, std::string> numbered_children(const h5::group& parent);

// Element types that a dataset may have, as a bit mask.
enum type_mask : unsigned { integers = 1, halves = 2, floats = 4, doubles = 8 };

struct extent {
  const char* name;  // nullptr: a constant
  std::int64_t size;
};

// Type, rank and extents against the header, and the extents against the size of the file.
void expect_dataset(const h5::dataset& data, const std::vector<extent>& shape, unsigned types,
                    std::int64_t file_bytes);

}  // namespace kvreplay::traces
