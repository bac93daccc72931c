#include "traces/structure.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "traces/layout.hpp"

namespace kvreplay::traces {

namespace {

constexpr std::int64_t max_int = 2147483647;
constexpr std::int64_t max_dim = std::int64_t{1} << 24;  // heads, widths, vocabularies

bool is_number(const std::string& name) {
  return !name.empty() && name.size() <= 9 &&
         std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::string shape_text(const std::vector<extent>& shape) {
  std::vector<std::string> parts;
  for (const extent& e : shape) {
    parts.push_back(e.name == nullptr ? fmt::format("{}", e.size)
                                      : fmt::format("{}={}", e.name, e.size));
  }
  return fmt::format("[{}]", fmt::join(parts, ", "));
}

std::string types_text(unsigned types) {
  std::vector<std::string> names;
  if (types & integers) names.emplace_back("integers");
  if (types & halves) names.emplace_back("float16 (IEEE, little-endian)");
  if (types & floats) names.emplace_back("float32");
  if (types & doubles) names.emplace_back("float64");
  return fmt::format("{}", fmt::join(names, " or "));
}

unsigned mask_of(h5::element kind) {
  switch (kind) {
    case h5::element::integer:
      return integers;
    case h5::element::float16:
      return halves;
    case h5::element::float32:
      return floats;
    case h5::element::float64:
      return doubles;
    default:
      return 0;
  }
}

std::vector<int> read_ints(const h5::dataset& data, std::int64_t low, std::int64_t high) {
  std::vector<int> values;
  for (const std::int64_t value : data.read_integers(0, data.extents()[0])) {
    if (value < low || value > high) {
      throw trace_error(fmt::format("{}: value {} at index {}, expected {} to {}", data.where(),
                                    value, values.size(), low, high));
    }
    values.push_back(static_cast<int>(value));
  }
  return values;
}

void expect_ascending(const h5::dataset& data, const std::vector<int>& values) {
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] <= values[i - 1]) {
      throw trace_error(fmt::format("{}: {} follows {} at index {}, expected ascending values",
                                    data.where(), values[i], values[i - 1], i));
    }
  }
}

std::string optional_text(const h5::group& group, const char* name) {
  return group.has_attribute(name) ? group.text(name) : std::string();
}

std::string choice(const h5::group& group, const char* name,
                   const std::vector<std::string>& choices) {
  const std::string value = group.text(name);
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    throw trace_error(fmt::format("{}: attribute {} is '{}', expected {}", group.where(), name,
                                  value, fmt::join(choices, " or ")));
  }
  return value;
}

// ---- root and model --------------------------------------------------------------------------

bool read_root(const h5::group& root, const open_options& options, structure& out) {
  if (!root.has_attribute("format")) {
    throw trace_error(root.where() +
                      ": attribute format is missing, expected 'kvtrace': not a trace");
  }
  if (const std::string format = root.text("format"); format != "kvtrace") {
    throw trace_error(
        fmt::format("{}: attribute format is '{}', expected 'kvtrace'", root.where(), format));
  }
  const std::int64_t version = root.integer("version", 1, max_int);
  if (version > format_version) {
    throw trace_error(fmt::format(
        "{}: kvtrace version {}, expected at most {} (hint: a newer kvreplay wrote this file and "
        "reads it)",
        root.where(), version, format_version));
  }
  out.complete = root.integer("complete", 0, 1) == 1;
  if (!out.complete && !options.recover) {
    throw trace_error(root.where() +
                      ": attribute complete is 0, expected 1: the recording did not end (hint: "
                      "--recover reads what was committed)");
  }
  out.producer = optional_text(root, "producer");
  out.created = optional_text(root, "created");
  return out.complete;
}

void read_model_header(const h5::group& group, model_info& model) {
  const auto size = [&](const char* name) {
    return static_cast<int>(group.integer(name, 1, max_dim));
  };
  model.name = group.text("name");
  model.architecture = group.text("architecture");
  model.n_layers = size("n_layers");
  model.n_q_heads = size("n_q_heads");
  model.n_kv_heads = size("n_kv_heads");
  model.head_dim = size("head_dim");
  model.value_dim = size("value_dim");
  model.hidden_size = size("hidden_size");
  model.vocab_size = size("vocab_size");
  model.logit_size = static_cast<int>(group.integer("logit_size", model.vocab_size, max_dim));
  if (model.n_q_heads % model.n_kv_heads != 0) {
    throw trace_error(
        fmt::format("{}: n_q_heads {} is not a multiple of n_kv_heads {}: every KV head serves the "
                    "same number of query heads",
                    group.where(), model.n_q_heads, model.n_kv_heads));
  }
  model.softmax_scale = group.real("softmax_scale");
  if (model.softmax_scale <= 0) {
    throw trace_error(fmt::format("{}: attribute softmax_scale is {}, expected more than 0",
                                  group.where(), model.softmax_scale));
  }
}

void read_model_options(const h5::group& group, model_info& model) {
  model.rope = choice(group, "rope", {"none", "half", "interleaved"});
  model.rope_dim = group.has_attribute("rope_dim")
                       ? static_cast<int>(group.integer("rope_dim", 0, model.head_dim))
                       : model.head_dim;
  model.key_rotation = choice(group, "key_rotation", {"rotated", "raw"});
  if (group.has_attribute("score_softcap")) model.score_softcap = group.real("score_softcap");
  if (model.score_softcap != 0) {
    throw trace_error(fmt::format(
        "{}: attribute score_softcap is {}, expected 0: scores with a soft cap cannot be replayed",
        group.where(), model.score_softcap));
  }
  model.compute_dtype = optional_text(group, "compute_dtype");
  if (group.has_attribute("cache_dtype")) {
    model.cache_dtype = choice(group, "cache_dtype", {"float16", "float32"});
  }
  model.model_fingerprint = optional_text(group, "model_fingerprint");
}

template <class T>
std::vector<T> read_all(const h5::dataset& data, hid_t type) {
  std::vector<T> values(static_cast<size_t>(data.extents()[0] * data.row_values()));
  data.read(type, 0, data.extents()[0], values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      throw trace_error(fmt::format("{}: {} at flat index {}, expected finite values", data.where(),
                                    values[i], i));
    }
  }
  return values;
}

void read_layer_lists(const h5::group& group, std::int64_t bytes, model_info& model) {
  const std::int64_t n = model.n_layers;
  if (group.has("layers")) {
    const h5::dataset data = group.open_dataset("layers");
    const std::int64_t count = data.extents().empty() ? -1 : data.extents()[0];
    expect_dataset(data, {{"n_rec", std::clamp<std::int64_t>(count, 1, n)}}, integers, bytes);
    model.layers = read_ints(data, 0, n - 1);
    expect_ascending(data, model.layers);
  } else {
    for (int layer = 0; layer < model.n_layers; ++layer) model.layers.push_back(layer);
  }
  model.window.assign(static_cast<size_t>(n), 0);
  if (group.has("window")) {
    const h5::dataset data = group.open_dataset("window");
    expect_dataset(data, {{"n_layers", n}}, integers, bytes);
    model.window = read_ints(data, 0, max_int);
  }
}

void read_model_data(const h5::group& group, std::int64_t bytes, structure& out) {
  model_info& model = out.model;
  if (group.has("sinks")) {
    const h5::dataset data = group.open_dataset("sinks");
    expect_dataset(data, {{"n_layers", model.n_layers}, {"n_q_heads", model.n_q_heads}}, floats,
                   bytes);
    model.sinks = read_all<float>(data, H5T_NATIVE_FLOAT);
  }
  if (group.has("rope_inv_freq")) {
    const h5::dataset data = group.open_dataset("rope_inv_freq");
    const bool shared = !data.extents().empty() && data.extents()[0] == 1;
    expect_dataset(data,
                   {{shared ? nullptr : "n_layers", shared ? 1 : model.n_layers},
                    {"rope_dim/2", model.rope_dim / 2}},
                   doubles | floats, bytes);
    model.rope_inv_freq = read_all<double>(data, H5T_NATIVE_DOUBLE);
    model.rope_inv_freq_rows = shared ? 1 : model.n_layers;
  }
  if (!group.has("wo")) return;
  const h5::group wo = group.open("wo");
  for (const auto& [layer, name] : numbered_children(wo)) {
    if (layer >= model.n_layers) {
      throw trace_error(fmt::format("{}: layer {}, expected layers below n_layers={}", wo.where(),
                                    layer, model.n_layers));
    }
    expect_dataset(wo.open_dataset(name),
                   {{"n_q_heads", model.n_q_heads},
                    {"value_dim", model.value_dim},
                    {"hidden_size", model.hidden_size}},
                   halves | floats, bytes);
    model.wo_layers.push_back(layer);
    out.wo_paths[layer] = "model/wo/" + name;
  }
}

// ---- sequences -------------------------------------------------------------------------------

struct validation {  // what every rule below needs
  const structure* file;
  std::int64_t bytes;
  std::int64_t file_tokens = 0;  // T of the file, before a cut to `committed`
  std::int64_t kept_tokens = 0;  // after it
};

// Storage of the first `rows` rows along dimension 0, where that dimension is positions or rows.
void expect_written(const h5::dataset& data, std::int64_t rows, std::int64_t first_position) {
  if (const auto hole = data.first_unwritten(rows)) {
    throw trace_error(fmt::format("{}: rows from step {} on were never written, expected {} rows",
                                  data.where(), first_position + *hole, rows));
  }
}

std::vector<std::pair<int, int>> read_ranges(const h5::dataset& data, const validation& v) {
  const std::int64_t n = data.extents().empty() ? 0 : data.extents()[0];
  expect_dataset(data, {{"n", std::min(n, v.file_tokens)}, {nullptr, 2}}, integers, v.bytes);
  const std::vector<std::int64_t> values = data.read_integers(0, n);
  std::vector<std::pair<int, int>> ranges;
  for (size_t i = 0; i + 1 < values.size(); i += 2) {
    if (values[i] < 0 || values[i] > values[i + 1] || values[i + 1] > v.file_tokens) {
      throw trace_error(
          fmt::format("{}: range [{}, {}) at index {}, expected 0 <= begin <= end <= {}",
                      data.where(), values[i], values[i + 1], i / 2, v.file_tokens));
    }
    const std::int64_t end = std::min(values[i + 1], v.kept_tokens);
    if (values[i] < end || values[i] == values[i + 1]) {
      ranges.emplace_back(static_cast<int>(std::min(values[i], end)), static_cast<int>(end));
    }
  }
  return ranges;
}

void read_row_datasets(const h5::group& group, const validation& v, sequence_info& info) {
  const model_info& model = v.file->model;
  std::int64_t rows = 0;
  if (group.has("logit_pos")) {
    const h5::dataset data = group.open_dataset("logit_pos");
    rows = data.extents().empty() ? 0 : data.extents()[0];
    expect_dataset(data, {{"R", std::min(rows, v.file_tokens)}}, integers, v.bytes);
    info.logit_pos = read_ints(data, 0, v.file_tokens - 1);
    expect_ascending(data, info.logit_pos);
    std::erase_if(info.logit_pos, [&](std::int32_t t) { return t >= v.kept_tokens; });
  }
  const auto kept = static_cast<std::int64_t>(info.logit_pos.size());
  const auto row_dataset = [&](const char* name, const std::vector<extent>& shape, unsigned types) {
    if (!group.has(name)) return false;
    if (!group.has("logit_pos")) {
      throw trace_error(group.at("logit_pos") + ": missing, expected the positions of " + name);
    }
    const h5::dataset data = group.open_dataset(name);
    expect_dataset(data, shape, types, v.bytes);
    if (const auto hole = data.first_unwritten(kept)) {
      throw trace_error(fmt::format("{}: rows from step {} on were never written, expected {} rows",
                                    data.where(), info.logit_pos[static_cast<size_t>(*hole)],
                                    kept));
    }
    return true;
  };
  info.has_logits =
      row_dataset("logits", {{"R", rows}, {"logit_size", model.logit_size}}, halves | floats);
  info.logits_float16 =
      info.has_logits && group.open_dataset("logits").kind() == h5::element::float16;
  info.has_confidence = row_dataset("confidence", {{"R", rows}, {nullptr, 4}}, floats);
  info.has_residual_final = row_dataset(
      "residual_final", {{"R", rows}, {"hidden_size", model.hidden_size}}, halves | floats);
}

void read_ranges_of(const h5::group& group, const validation& v, sequence_info& info) {
  if (group.has("chunks")) {
    const h5::dataset data = group.open_dataset("chunks");
    info.chunks = read_ranges(data, v);
    if (data.extents()[0] > 1) {
      throw trace_error(fmt::format(
          "{}: {} chunks, expected at most 1: multi-turn prompts cannot be replayed yet",
          data.where(), data.extents()[0]));
    }
  }
  if (!group.has("spans")) return;
  const h5::group spans = group.open("spans");
  for (const std::string& name : spans.children()) {
    info.spans[name] = read_ranges(spans.open_dataset(name), v);
  }
}

void read_attention(const h5::group& group, const validation& v, layer_entry& entry) {
  const h5::dataset positions = group.open_dataset("attn_pos");
  const std::int64_t rows = positions.extents().empty() ? 0 : positions.extents()[0];
  expect_dataset(positions, {{"Ra", std::min(rows, v.file_tokens)}}, integers, v.bytes);
  entry.attn_pos = read_ints(positions, 0, v.file_tokens - 1);
  expect_ascending(positions, entry.attn_pos);
  std::erase_if(entry.attn_pos, [&](std::int32_t t) { return t >= v.kept_tokens; });
  const h5::dataset data = group.open_dataset("attn");
  expect_dataset(data, {{"Ra", rows}, {"n_q_heads", v.file->model.n_q_heads}, {"T", v.file_tokens}},
                 halves, v.bytes);
  if (const auto hole = data.first_unwritten(static_cast<std::int64_t>(entry.attn_pos.size()))) {
    throw trace_error(fmt::format("{}: rows from step {} on were never written", data.where(),
                                  entry.attn_pos[static_cast<size_t>(*hole)]));
  }
  entry.info.has_attn = true;
}

layer_entry read_layer_entry(const h5::group& group, const validation& v, std::int64_t n_prompt) {
  const model_info& model = v.file->model;
  layer_entry entry;
  layer_info& info = entry.info;
  if (group.has_attribute("first_row"))
    info.first_row = group.integer("first_row", 0, n_prompt - 1);
  const extent all{"T", v.file_tokens},
      tail{info.first_row > 0 ? "T-first_row" : "T", v.file_tokens - info.first_row};
  const extent q_heads{"n_q_heads", model.n_q_heads}, kv_heads{"n_kv_heads", model.n_kv_heads};
  const extent key{"head_dim", model.head_dim}, value{"value_dim", model.value_dim};
  const auto has = [&](const char* name, const std::vector<extent>& shape, unsigned types) {
    if (!group.has(name)) return false;
    const h5::dataset data = group.open_dataset(name);
    expect_dataset(data, shape, types, v.bytes);
    const std::int64_t first = shape[0].name == tail.name ? info.first_row : 0;
    expect_written(data, v.kept_tokens - first, first);
    return true;
  };
  info.has_q = has("q", {tail, q_heads, key}, halves);
  info.has_k = has("k", {all, kv_heads, key}, halves);
  info.has_v = has("v", {all, kv_heads, value}, halves);
  info.has_o = has("o", {tail, q_heads, value}, halves | floats);
  info.has_lse = has("lse", {tail, q_heads}, floats);
  info.has_value_norm = has("value_norm", {all, q_heads}, floats);
  info.has_residual_norm = has("residual_norm", {all}, floats);
  info.has_image_score = has("image_score", {all}, floats);
  info.has_retention = has("retention", {all, kv_heads}, floats);
  if (group.has("column_sum")) {
    const h5::dataset data = group.open_dataset("column_sum");
    expect_dataset(data, {q_heads, {"P", n_prompt}}, floats, v.bytes);
    if (data.first_unwritten(model.n_q_heads)) {
      throw trace_error(data.where() + ": was never written");
    }
    info.has_column_sum = true;
  }
  if (group.has("attn") || group.has("attn_pos")) read_attention(group, v, entry);
  for (const char* name : {"q", "k", "v"}) {
    if (!info.has_attn && !group.has(name)) {
      throw trace_error(group.at(name) + ": missing, expected q, k and v (or attn and attn_pos)");
    }
  }
  return entry;
}

void read_layers(const h5::group& group, const validation& v, sequence_entry& sequence) {
  const model_info& model = v.file->model;
  const h5::group layers = group.open("layers");
  const std::map<int, std::string> names = numbered_children(layers);
  for (const int layer : model.layers) {
    if (!names.contains(layer)) {
      throw trace_error(fmt::format("{}: layer {} is missing, expected {} layers", layers.where(),
                                    layer, model.layers.size()));
    }
  }
  for (const auto& [layer, name] : names) {
    if (!std::binary_search(model.layers.begin(), model.layers.end(), layer)) {
      throw trace_error(fmt::format("{}: layer {} is not among the {} recorded layers of the model",
                                    layers.where(), layer, model.layers.size()));
    }
    layer_entry entry = read_layer_entry(layers.open(name), v, sequence.info.n_prompt);
    entry.path = fmt::format("{}/layers/{}", sequence.path, name);
    sequence.layers.emplace(layer, std::move(entry));
  }
}

void read_sequence_header(const h5::group& group, sequence_info& info) {
  info.n_tokens = group.integer("n_tokens", 1, max_int);
  info.n_prompt = group.integer("n_prompt", 1, info.n_tokens);
  info.committed = group.integer("committed", 0, info.n_tokens);
  info.name = optional_text(group, "name");
  info.task = optional_text(group, "task");
  info.source = optional_text(group, "source");
  info.fingerprint = optional_text(group, "fingerprint");
  if (group.has_attribute("temperature")) info.temperature = group.real("temperature");
  if (group.has_attribute("seed")) info.seed = group.integer("seed", INT64_MIN, INT64_MAX);
}

void read_sequence(const h5::group& group, sequence_entry& sequence, validation v) {
  sequence_info& info = sequence.info;
  v.file_tokens = info.n_tokens;
  if (v.file->complete && info.committed != info.n_tokens) {
    throw trace_error(
        fmt::format("{}: attribute committed is {}, expected n_tokens={} in a complete file",
                    group.where(), info.committed, info.n_tokens));
  }
  info.n_tokens = v.kept_tokens = info.committed;
  const h5::dataset tokens = group.open_dataset("tokens");
  expect_dataset(tokens, {{"T", v.file_tokens}}, integers, v.bytes);
  expect_written(tokens, v.kept_tokens, 0);
  read_row_datasets(group, v, info);
  read_ranges_of(group, v, info);
  read_layers(group, v, sequence);
}

void read_sequences(const h5::group& root, std::int64_t bytes, structure& out) {
  const h5::group parent = root.open("sequences");
  const std::map<int, std::string> names = numbered_children(parent);
  if (names.empty()) throw trace_error(parent.where() + ": empty, expected at least one sequence");
  int expected = names.begin()->first;
  std::string shortest;
  for (const auto& [id, name] : names) {
    if (id != expected++) {
      throw trace_error(fmt::format("{}: sequence {} follows {}: {} is missing", parent.where(), id,
                                    expected - 2, expected - 1));
    }
    const h5::group group = parent.open(name);
    sequence_entry sequence;
    sequence.info.id = id;
    sequence.path = "sequences/" + name;
    read_sequence_header(group, sequence.info);
    if (!out.complete && sequence.info.committed < sequence.info.n_prompt) {
      shortest = fmt::format("{}: committed {} of {} prompt positions", group.where(),
                             sequence.info.committed, sequence.info.n_prompt);
      continue;  // nothing to replay in it
    }
    read_sequence(group, sequence, {&out, bytes});
    out.sequences.push_back(std::move(sequence));
  }
  if (out.sequences.empty()) {
    throw trace_error(shortest + ", expected at least the whole prompt: nothing to recover");
  }
}

}  // namespace

std::map<int, std::string> numbered_children(const h5::group& parent) {
  std::map<int, std::string> numbered;
  for (const std::string& name : parent.children()) {
    if (!is_number(name)) continue;
    int number = 0;
    std::from_chars(name.data(), name.data() + name.size(), number);
    const auto [at, added] = numbered.emplace(number, name);
    if (!added) {
      throw trace_error(fmt::format("{}: '{}' and '{}' are two spellings of one number",
                                    parent.where(), at->second, name));
    }
  }
  return numbered;
}

void expect_dataset(const h5::dataset& data, const std::vector<extent>& shape, unsigned types,
                    std::int64_t file_bytes) {
  if ((mask_of(data.kind()) & types) == 0) {
    const bool bfloat = data.type_name() == "bfloat16";
    throw trace_error(fmt::format("{}: element type {}, expected {}{}", data.where(),
                                  data.type_name(), types_text(types),
                                  bfloat ? " (hint: record a bfloat16 model as float16)" : ""));
  }
  const std::vector<std::int64_t>& extents = data.extents();
  const bool same = std::equal(extents.begin(), extents.end(), shape.begin(), shape.end(),
                               [](std::int64_t found, const extent& e) { return found == e.size; });
  if (!same) {
    throw trace_error(fmt::format("{}: shape [{}], expected {}", data.where(),
                                  fmt::join(extents, ", "), shape_text(shape)));
  }
  // Deflate shrinks at most 1032 to 1, so larger claims cannot be backed by the file.
  const std::optional<std::int64_t> count = element_count(extents);
  if (!count || *count > (file_bytes + 1024) * 1100) {
    throw trace_error(fmt::format("{}: shape [{}] cannot be held by a file of {} bytes",
                                  data.where(), fmt::join(extents, ", "), file_bytes));
  }
}

structure read_structure(const h5::group& root, const open_options& options,
                         std::int64_t file_bytes) {
  structure out;
  read_root(root, options, out);
  const h5::group model = root.open("model");
  read_model_header(model, out.model);
  read_model_options(model, out.model);
  read_layer_lists(model, file_bytes, out.model);
  read_model_data(model, file_bytes, out);
  read_sequences(root, file_bytes, out);
  return out;
}

}  // namespace kvreplay::traces
