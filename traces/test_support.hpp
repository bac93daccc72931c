// Shared by the tests of traces/: small traces, unique folders, and edits of files behind the
// writer's back.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "traces/float16.hpp"
#include "traces/hdf5.hpp"
#include "traces/reader.hpp"
#include "traces/writer.hpp"

namespace kvreplay::traces::testing {

inline std::string test_data(const std::string& name) {
  return std::string(KVREPLAY_SOURCE_DIR) + "/traces/testdata/" + name;
}

class temp_folder {
 public:
  temp_folder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "kvreplay-traces-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~temp_folder() {
    std::error_code ignored;
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all, ignored);
    std::filesystem::remove_all(path_, ignored);
  }
  temp_folder(const temp_folder&) = delete;
  temp_folder& operator=(const temp_folder&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// Extents that no swap of axes survives: T 7, n_kv_heads 3, head_dim 5, value_dim 2.
inline model_info small_model(int layers = 2) {
  model_info m;
  m.name = "small";
  m.architecture = "llama";
  m.n_layers = layers;
  m.n_q_heads = 6;
  m.n_kv_heads = 3;
  m.head_dim = 5;
  m.value_dim = 2;
  m.hidden_size = 11;
  m.vocab_size = 13;
  m.logit_size = 17;
  m.softmax_scale = 0.5;
  return m;
}

inline sequence_plan small_plan(std::int64_t prompt = 4, std::int64_t tokens = 7) {
  sequence_plan p;
  p.n_prompt = prompt;
  p.n_tokens = tokens;
  for (std::int64_t t = prompt - 1; t < tokens; ++t) {
    p.logit_pos.push_back(static_cast<std::int32_t>(t));
  }
  p.confidence = true;
  return p;
}

inline std::vector<half_bits> half_rows(std::int64_t first, std::int64_t count,
                                        std::int64_t width) {
  std::vector<half_bits> rows;
  for (std::int64_t i = first * width; i < (first + count) * width; ++i) {
    rows.push_back(float_to_half(static_cast<float>(i % 97 + 1) / 32));
  }
  return rows;
}

inline std::vector<float> float_rows(std::int64_t first, std::int64_t count, std::int64_t width) {
  std::vector<float> rows;
  for (std::int64_t i = first * width; i < (first + count) * width; ++i) {
    rows.push_back(static_cast<float>(i % 89 + 1) / 16);
  }
  return rows;
}

// Positions [first, end) of every dataset that the small plan holds, in all layers.
inline void put_steps(writer& out, const model_info& m, const sequence_plan& p, std::int64_t first,
                      std::int64_t end) {
  const std::int64_t n = end - first;
  std::vector<std::int32_t> tokens;
  for (std::int64_t t = first; t < end; ++t) {
    tokens.push_back(static_cast<std::int32_t>(t % m.vocab_size));
  }
  out.put_tokens(first, tokens);
  for (size_t r = 0; r < p.logit_pos.size(); ++r) {
    if (p.logit_pos[r] < first || p.logit_pos[r] >= end || !p.confidence) continue;
    out.put_confidence(static_cast<std::int64_t>(r), std::vector<float>{1.5f, 0.5f, 0.4f, 3.f});
  }
  const int layers = m.layers.empty() ? m.n_layers : static_cast<int>(m.layers.size());
  for (int i = 0; i < layers; ++i) {
    const int layer = m.layers.empty() ? i : m.layers[static_cast<size_t>(i)];
    out.put_k(layer, first, half_rows(first, n, m.n_kv_heads * m.head_dim));
    out.put_v(layer, first, half_rows(first, n, m.n_kv_heads * m.value_dim));
    const std::int64_t row = std::max(first, p.first_row);
    if (row >= end) continue;
    out.put_q(layer, row, half_rows(row, end - row, m.n_q_heads * m.head_dim));
    out.put_o(layer, row, float_rows(row, end - row, m.n_q_heads * m.value_dim));
    out.put_lse(layer, row, float_rows(row, end - row, m.n_q_heads));
  }
}

inline void write_small(const std::string& path, const model_info& m, const sequence_plan& p,
                        int sequences = 1) {
  writer out(path, m, "test");
  for (int s = 0; s < sequences; ++s) {
    out.begin_sequence(p);
    put_steps(out, m, p, 0, p.n_tokens);
    out.end_sequence();
  }
  out.finish();
}

// Opens a finished file for changes that our writer would refuse.
inline void edit(const std::string& path, const std::function<void(hid_t)>& change) {
  const h5::session guard;
  const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  REQUIRE(H5Pset_file_locking(access, false, true) >= 0);
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, access);
  REQUIRE(file >= 0);
  change(file);
  REQUIRE(H5Fclose(file) >= 0);
  H5Pclose(access);
}

// A dataset of `type` (not owned) filled with `values`; null leaves it unwritten.
inline void make_dataset(hid_t file, const std::string& name, const std::vector<hsize_t>& extents,
                         hid_t type, const void* values, const std::vector<hsize_t>& chunk = {},
                         int deflate = 0) {
  if (H5Lexists(file, name.c_str(), H5P_DEFAULT) > 0) {
    REQUIRE(H5Ldelete(file, name.c_str(), H5P_DEFAULT) >= 0);
  }
  const hid_t space = H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr);
  const hid_t create = H5Pcreate(H5P_DATASET_CREATE);
  if (!chunk.empty()) H5Pset_chunk(create, static_cast<int>(chunk.size()), chunk.data());
  if (deflate > 0) {
    H5Pset_shuffle(create);
    H5Pset_deflate(create, static_cast<unsigned>(deflate));
  }
  const hid_t data = H5Dcreate2(file, name.c_str(), type, space, H5P_DEFAULT, create, H5P_DEFAULT);
  REQUIRE(data >= 0);
  if (values != nullptr) REQUIRE(H5Dwrite(data, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0);
  H5Dclose(data);
  H5Pclose(create);
  H5Sclose(space);
}

template <class T>
void set_attribute(hid_t file, const std::string& object, const char* name, hid_t type, T value) {
  if (H5Aexists_by_name(file, object.c_str(), name, H5P_DEFAULT) > 0) {
    H5Adelete_by_name(file, object.c_str(), name, H5P_DEFAULT);
  }
  const hid_t space = H5Screate(H5S_SCALAR);
  const hid_t attribute = H5Acreate_by_name(file, object.c_str(), name, type, space, H5P_DEFAULT,
                                            H5P_DEFAULT, H5P_DEFAULT);
  REQUIRE(attribute >= 0);
  REQUIRE(H5Awrite(attribute, type, &value) >= 0);
  H5Aclose(attribute);
  H5Sclose(space);
}

// Overwrites one 16-bit or 32-bit value in place, at a flat index.
template <class T>
void poke(hid_t file, const std::string& name, size_t index, T value) {
  const hid_t data = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
  REQUIRE(data >= 0);
  const hid_t type = H5Dget_type(data);
  const hid_t space = H5Dget_space(data);
  REQUIRE(H5Tget_size(type) == sizeof(T));
  std::vector<T> values(static_cast<size_t>(H5Sget_simple_extent_npoints(space)));
  REQUIRE(H5Dread(data, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) >= 0);
  values.at(index) = value;
  REQUIRE(H5Dwrite(data, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) >= 0);
  H5Sclose(space);
  H5Tclose(type);
  H5Dclose(data);
}

inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const trace_error& error) {
    return error.what();
  }
  return "no error";
}

inline std::string open_error(const std::string& path, bool recover = false) {
  return error_of([&] { reader file(path, {.recover = recover}); });
}

// One line that names the file and holds every part.
inline void check_message(const std::string& message, const std::string& path,
                          const std::vector<std::string>& parts) {
  INFO(message);
  CHECK(message.rfind(path, 0) == 0);
  CHECK(message.find('\n') == std::string::npos);
  for (const std::string& part : parts) {
    INFO(part);
    CHECK(message.find(part) != std::string::npos);
  }
}

}  // namespace kvreplay::traces::testing
