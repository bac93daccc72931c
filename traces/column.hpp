// One dataset that is being written: its plan, its storage and which rows it has. Internal to
// traces/.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "traces/hdf5.hpp"
#include "traces/writer.hpp"

namespace kvreplay::traces {

enum class row_axis { position, query, logit_row, attention_row, head };  // what dimension 0 counts

struct planned_column {
  std::string name;
  std::vector<std::int64_t> extents;
  h5::element kind;
  row_axis axis;
};

std::vector<planned_column> plan_sequence(const model_info& model, const sequence_plan& plan);
std::vector<planned_column> plan_layer(const model_info& model, const sequence_plan& plan);
std::int64_t chunk_rows(const planned_column& plan);    // rows of one chunk, about 128 KiB
std::int64_t stored_bytes(const planned_column& plan);  // whole chunks

// Throw trace_error where what is to be written would break a rule of FORMAT.md.
void check_model(const model_info& model, const std::string& file);
void check_plan(const model_info& model, const sequence_plan& plan, const std::string& file);

// All members but check_rows are called inside an h5::session.
class column {
 public:
  column(hid_t parent, const std::string& name, const planned_column& plan, std::string where);

  const std::string& where() const { return where_; }
  h5::element kind() const { return plan_.kind; }
  row_axis axis() const { return plan_.axis; }
  std::int64_t width() const { return width_; }          // values of one row
  std::int64_t rows_written() const { return prefix_; }  // without a gap, from row 0
  // Throws unless `values` are whole rows within the extents; returns the width.
  std::int64_t check_rows(std::int64_t row, size_t values) const;
  void write(std::int64_t row, const void* data, size_t values);
  void close();  // throws where HDF5 reports an error
  void abandon() noexcept { id_.abandon(); }

 private:
  void mark(std::int64_t begin, std::int64_t end);

  std::string where_;
  planned_column plan_;
  std::int64_t width_ = 1, prefix_ = 0;
  std::map<std::int64_t, std::int64_t> later_;  // begin -> end of rows beyond a gap
  h5::handle id_;
};

h5::handle create_group(hid_t parent, const std::string& name, const std::string& where);
void write_text(hid_t object, const char* name, const std::string& text, const std::string& where);
template <class T>
h5::handle write_number(hid_t object, const char* name, T value, const std::string& where);
template <class T>
void write_array(hid_t parent, const char* name, std::initializer_list<std::int64_t> extents,
                 std::span<const T> values, const std::string& where);

}  // namespace kvreplay::traces
