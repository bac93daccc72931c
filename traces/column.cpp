#include "traces/column.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "traces/layout.hpp"

namespace kvreplay::traces {

using h5::element;

namespace {

constexpr std::int64_t chunk_bytes = 128 << 10;

std::int64_t size_of(element kind) { return kind == element::float16 ? 2 : 4; }

template <class T>
hid_t native_type();
template <>
hid_t native_type<std::uint8_t>() {
  return H5T_NATIVE_UINT8;
}
template <>
hid_t native_type<std::uint32_t>() {
  return H5T_NATIVE_UINT32;
}
template <>
hid_t native_type<std::uint64_t>() {
  return H5T_NATIVE_UINT64;
}
template <>
hid_t native_type<std::int32_t>() {
  return H5T_NATIVE_INT32;
}
template <>
hid_t native_type<std::int64_t>() {
  return H5T_NATIVE_INT64;
}
template <>
hid_t native_type<float>() {
  return H5T_NATIVE_FLOAT;
}
template <>
hid_t native_type<double>() {
  return H5T_NATIVE_DOUBLE;
}

h5::handle element_type(element kind) {
  if (kind == element::float16) return h5::float16_type();
  return h5::handle(H5Tcopy(kind == element::float32 ? H5T_IEEE_F32LE : H5T_STD_I32LE), H5Tclose);
}

// NaN in floats, -1 in integers: what was never written is never taken for data.
void set_fill(hid_t properties, element kind, hid_t type, const std::string& where) {
  const std::uint16_t half_nan = 0x7e00;
  const float float_nan = std::numeric_limits<float>::quiet_NaN();
  const std::int32_t none = -1;
  const void* value = &none;
  if (kind == element::float16) value = &half_nan;
  if (kind == element::float32) value = &float_nan;
  if (H5Pset_fill_value(properties, type, value) < 0) h5::fail(where, "cannot set the fill value");
}

std::int64_t row_bytes(const planned_column& plan) {
  std::int64_t bytes = size_of(plan.kind);
  for (size_t axis = 1; axis < plan.extents.size(); ++axis) bytes *= plan.extents[axis];
  return bytes;
}

void need(bool good, const std::string& where, const std::string& what) {
  if (!good) throw trace_error(where + ": " + what);
}

void check_ascending(const std::vector<std::int32_t>& positions, std::int64_t limit,
                     const std::string& where) {
  std::int64_t last = -1;
  for (const std::int32_t position : positions) {
    need(position > last && position < limit, where,
         fmt::format("position {} after {}, expected ascending positions below {}", position, last,
                     limit));
    last = position;
  }
}

}  // namespace

// ---- plans -----------------------------------------------------------------------------------

std::vector<planned_column> plan_sequence(const model_info& model, const sequence_plan& plan) {
  const auto rows = static_cast<std::int64_t>(plan.logit_pos.size());
  std::vector<planned_column> columns = {
      {"tokens", {plan.n_tokens}, element::integer, row_axis::position}};
  if (plan.logits) {
    columns.push_back({"logits", {rows, model.logit_size}, element::float32, row_axis::logit_row});
  }
  if (plan.confidence) {
    columns.push_back({"confidence", {rows, 4}, element::float32, row_axis::logit_row});
  }
  if (plan.residual_final) {
    columns.push_back({"residual_final",
                       {rows, model.hidden_size},
                       model.cache_dtype == "float16" ? element::float16 : element::float32,
                       row_axis::logit_row});
  }
  return columns;
}

std::vector<planned_column> plan_layer(const model_info& model, const sequence_plan& plan) {
  const std::int64_t t = plan.n_tokens, tail = t - plan.first_row;
  const std::int64_t hq = model.n_q_heads, hkv = model.n_kv_heads;
  const element half = element::float16, full = element::float32;
  std::vector<planned_column> columns;
  const auto add = [&](bool wanted, planned_column column) {
    if (wanted) columns.push_back(std::move(column));
  };
  add(plan.kv, {"k", {t, hkv, model.head_dim}, half, row_axis::position});
  add(plan.kv, {"v", {t, hkv, model.value_dim}, half, row_axis::position});
  add(plan.q, {"q", {tail, hq, model.head_dim}, half, row_axis::query});
  add(plan.o, {"o", {tail, hq, model.value_dim}, plan.o_float16 ? half : full, row_axis::query});
  add(plan.lse, {"lse", {tail, hq}, full, row_axis::query});
  add(plan.value_norm, {"value_norm", {t, hq}, full, row_axis::position});
  add(plan.residual_norm, {"residual_norm", {t}, full, row_axis::position});
  add(plan.retention, {"retention", {t, hkv}, full, row_axis::position});
  add(plan.image_score, {"image_score", {t}, full, row_axis::position});
  add(plan.column_sum, {"column_sum", {hq, plan.n_prompt}, full, row_axis::head});
  const auto attn_rows = static_cast<std::int64_t>(plan.attn_pos.size());
  add(attn_rows > 0, {"attn", {attn_rows, hq, t}, half, row_axis::attention_row});
  return columns;
}

std::int64_t chunk_rows(const planned_column& plan) {
  // Equal chunks, so that the last one wastes little.
  const std::int64_t rows = std::max<std::int64_t>(plan.extents[0], 1);
  const std::int64_t per_chunk = std::max<std::int64_t>(chunk_bytes / row_bytes(plan), 1);
  const std::int64_t chunks = (rows + per_chunk - 1) / per_chunk;
  return (rows + chunks - 1) / chunks;
}

std::int64_t stored_bytes(const planned_column& plan) {
  const std::int64_t rows = chunk_rows(plan);
  return (plan.extents[0] + rows - 1) / rows * rows * row_bytes(plan);
}

void check_model(const model_info& m, const std::string& file) {
  const std::string where = file + ": model";
  for (const auto& [name, value] :
       {std::pair{"n_layers", m.n_layers}, std::pair{"n_q_heads", m.n_q_heads},
        std::pair{"n_kv_heads", m.n_kv_heads}, std::pair{"head_dim", m.head_dim},
        std::pair{"value_dim", m.value_dim}, std::pair{"hidden_size", m.hidden_size},
        std::pair{"vocab_size", m.vocab_size}}) {
    need(value >= 1, where, fmt::format("{} is {}, expected at least 1", name, value));
  }
  need(m.n_q_heads % m.n_kv_heads == 0, where,
       fmt::format("n_q_heads {} is not a multiple of n_kv_heads {}", m.n_q_heads, m.n_kv_heads));
  need(m.logit_size >= m.vocab_size, where,
       fmt::format("logit_size {} is below vocab_size {}", m.logit_size, m.vocab_size));
  need(std::isfinite(m.softmax_scale) && m.softmax_scale > 0, where,
       fmt::format("softmax_scale {}, expected a finite number above 0", m.softmax_scale));
  need(m.rope == "none" || m.rope == "half" || m.rope == "interleaved", where,
       fmt::format("rope '{}', expected none, half or interleaved", m.rope));
  need(m.key_rotation == "rotated" || m.key_rotation == "raw", where,
       fmt::format("key_rotation '{}', expected rotated or raw", m.key_rotation));
  need(m.cache_dtype.empty() || m.cache_dtype == "float16" || m.cache_dtype == "float32", where,
       fmt::format("cache_dtype '{}', expected float16 or float32", m.cache_dtype));
  check_ascending(m.layers, m.n_layers, where + "/layers");
  const auto n = static_cast<size_t>(m.n_layers);
  need(m.window.size() == n, where, fmt::format("{} windows for {} layers", m.window.size(), n));
  need(m.sinks.empty() || m.sinks.size() == n * static_cast<size_t>(m.n_q_heads), where,
       fmt::format("{} sinks, expected n_layers * n_q_heads", m.sinks.size()));
  need(m.rope_inv_freq.size() ==
           static_cast<size_t>(m.rope_inv_freq_rows) * static_cast<size_t>(m.rope_dim / 2),
       where,
       fmt::format("{} values of rope_inv_freq, expected {} rows of {}", m.rope_inv_freq.size(),
                   m.rope_inv_freq_rows, m.rope_dim / 2));
}

void check_plan(const model_info& model, const sequence_plan& plan, const std::string& file) {
  const std::int64_t limit = std::numeric_limits<std::int32_t>::max();
  need(plan.n_tokens >= 1 && plan.n_tokens <= limit, file,
       fmt::format("{} tokens, expected 1 to {}", plan.n_tokens, limit));
  need(plan.n_prompt >= 1 && plan.n_prompt <= plan.n_tokens, file,
       fmt::format("prompt of {} tokens, expected 1 to {}", plan.n_prompt, plan.n_tokens));
  need(plan.first_row >= 0 && plan.first_row < plan.n_prompt, file,
       fmt::format("first_row {}, expected 0 to {}", plan.first_row, plan.n_prompt - 1));
  check_ascending(plan.logit_pos, plan.n_tokens, file + ": logit_pos");
  check_ascending(plan.attn_pos, plan.n_tokens, file + ": attn_pos");
  for (const planned_column& one : plan_layer(model, plan)) {
    const auto count = element_count(one.extents);
    need(count && *count < std::numeric_limits<std::int64_t>::max() / 8, file,
         fmt::format("{}: extents overflow", one.name));
  }
}

// ---- column ----------------------------------------------------------------------------------

column::column(hid_t parent, const std::string& name, const planned_column& plan, std::string where)
    : where_(std::move(where)), plan_(plan) {
  for (size_t axis = 1; axis < plan_.extents.size(); ++axis) width_ *= plan_.extents[axis];
  const std::vector<hsize_t> extents(plan_.extents.begin(), plan_.extents.end());
  const int rank = static_cast<int>(extents.size());
  const h5::handle space(H5Screate_simple(rank, extents.data(), nullptr), H5Sclose);
  const h5::handle type = element_type(plan_.kind);
  const h5::handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  const h5::handle links(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  if (!space || !type || !create || !links ||
      H5Pset_create_intermediate_group(links.get(), 1) < 0 ||
      H5Pset_obj_track_times(create.get(), false) < 0) {
    h5::fail(where_, "cannot describe the dataset");
  }
  set_fill(create.get(), plan_.kind, type.get(), where_);
  if (plan_.extents[0] > 0) {
    std::vector<hsize_t> chunk = extents;
    chunk[0] = static_cast<hsize_t>(chunk_rows(plan_));
    if (H5Pset_chunk(create.get(), rank, chunk.data()) < 0)
      h5::fail(where_, "cannot set the chunk");
  }
  id_ = h5::handle(H5Dcreate2(parent, name.c_str(), type.get(), space.get(), links.get(),
                              create.get(), H5P_DEFAULT),
                   H5Dclose);
  if (!id_) h5::fail(where_, "cannot create the dataset");
}

std::int64_t column::check_rows(std::int64_t row, size_t values) const {
  const auto count = static_cast<std::int64_t>(values);
  if (row < 0 || count % width_ != 0 || row + count / width_ > plan_.extents[0]) {
    throw trace_error(
        fmt::format("{}: {} values at row {}, expected whole rows of {} within {} rows", where_,
                    values, row, width_, plan_.extents[0]));
  }
  return width_;
}

void column::write(std::int64_t row, const void* data, size_t values) {
  const std::int64_t rows = static_cast<std::int64_t>(values) / width_;
  if (rows == 0) return;
  std::vector<hsize_t> start(plan_.extents.size(), 0);
  std::vector<hsize_t> size(plan_.extents.begin(), plan_.extents.end());
  start[0] = static_cast<hsize_t>(row);
  size[0] = static_cast<hsize_t>(rows);
  const h5::handle space(H5Dget_space(id_.get()), H5Sclose);
  const h5::handle memory(H5Screate_simple(static_cast<int>(size.size()), size.data(), nullptr),
                          H5Sclose);
  const h5::handle type = element_type(plan_.kind);
  if (!space || !memory ||
      H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, start.data(), nullptr, size.data(),
                          nullptr) < 0 ||
      H5Dwrite(id_.get(), type.get(), memory.get(), space.get(), H5P_DEFAULT, data) < 0) {
    h5::fail(where_, fmt::format("cannot write rows {} to {}: is the disk full?", row, row + rows));
  }
  mark(row, row + rows);
}

void column::close() {
  if (!id_.reset()) h5::fail(where_, "cannot close the dataset: is the disk full?");
}

void column::mark(std::int64_t begin, std::int64_t end) {
  std::int64_t& known = later_[begin];
  known = std::max(known, end);
  for (auto at = later_.begin(); at != later_.end() && at->first <= prefix_;
       at = later_.erase(at)) {
    prefix_ = std::max(prefix_, at->second);
  }
}

// ---- attributes and small arrays -------------------------------------------------------------

h5::handle create_group(hid_t parent, const std::string& name, const std::string& where) {
  h5::handle group(H5Gcreate2(parent, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                   H5Gclose);
  if (!group) h5::fail(where, "cannot create group " + name);
  return group;
}

void write_text(hid_t object, const char* name, const std::string& text, const std::string& where) {
  const h5::handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  const h5::handle space(H5Screate(H5S_SCALAR), H5Sclose);
  // Fixed length: variable-length strings live in a global heap, one more thing to lose in a crash.
  if (!type || !space || H5Tset_size(type.get(), text.size() + 1) < 0 ||
      H5Tset_cset(type.get(), H5T_CSET_UTF8) < 0) {
    h5::fail(where, fmt::format("cannot describe attribute {}", name));
  }
  const h5::handle attribute(
      H5Acreate2(object, name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!attribute || H5Awrite(attribute.get(), type.get(), text.c_str()) < 0) {
    h5::fail(where, fmt::format("cannot write attribute {}", name));
  }
}

template <class T>
h5::handle write_number(hid_t object, const char* name, T value, const std::string& where) {
  const h5::handle space(H5Screate(H5S_SCALAR), H5Sclose);
  h5::handle attribute(
      H5Acreate2(object, name, native_type<T>(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!attribute || H5Awrite(attribute.get(), native_type<T>(), &value) < 0) {
    h5::fail(where, fmt::format("cannot write attribute {}", name));
  }
  return attribute;
}

template <class T>
void write_array(hid_t parent, const char* name, std::initializer_list<std::int64_t> extents,
                 std::span<const T> values, const std::string& where) {
  const std::vector<hsize_t> sizes(extents.begin(), extents.end());
  const h5::handle space(H5Screate_simple(static_cast<int>(sizes.size()), sizes.data(), nullptr),
                         H5Sclose);
  const h5::handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (!create || H5Pset_obj_track_times(create.get(), false) < 0) {
    h5::fail(where, "cannot describe the dataset");
  }
  const h5::handle data(H5Dcreate2(parent, name, native_type<T>(), space.get(), H5P_DEFAULT,
                                   create.get(), H5P_DEFAULT),
                        H5Dclose);
  if (!space || !data ||
      (!values.empty() &&
       H5Dwrite(data.get(), native_type<T>(), H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) < 0)) {
    h5::fail(where, fmt::format("cannot write dataset {}", name));
  }
}

template h5::handle write_number(hid_t, const char*, std::uint8_t, const std::string&);
template h5::handle write_number(hid_t, const char*, std::uint32_t, const std::string&);
template h5::handle write_number(hid_t, const char*, std::uint64_t, const std::string&);
template h5::handle write_number(hid_t, const char*, std::int32_t, const std::string&);
template h5::handle write_number(hid_t, const char*, std::int64_t, const std::string&);
template h5::handle write_number(hid_t, const char*, double, const std::string&);
template void write_array(hid_t, const char*, std::initializer_list<std::int64_t>,
                          std::span<const std::int32_t>, const std::string&);
template void write_array(hid_t, const char*, std::initializer_list<std::int64_t>,
                          std::span<const float>, const std::string&);
template void write_array(hid_t, const char*, std::initializer_list<std::int64_t>,
                          std::span<const double>, const std::string&);

}  // namespace kvreplay::traces
