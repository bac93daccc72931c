#include "traces/reader.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>

#include "traces/data_rules.hpp"
#include "traces/fingerprint.hpp"
#include "traces/float16.hpp"
#include "traces/hdf5.hpp"
#include "traces/layout.hpp"
#include "traces/structure.hpp"

namespace kvreplay::traces {

namespace {

// What can be said before HDF5 sees the file: a pipe would hang it, and its own words for an empty
// file or a folder help nobody. Returns the size in bytes.
std::int64_t check_file(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    throw trace_error(fmt::format("{}: {}", path, std::strerror(errno)));
  }
  if (S_ISDIR(info.st_mode)) throw trace_error(path + ": is a folder, expected a trace file");
  if (!S_ISREG(info.st_mode)) throw trace_error(path + ": not a regular file");
  if (::access(path.c_str(), R_OK) != 0) {
    throw trace_error(fmt::format("{}: {}", path, std::strerror(errno)));
  }
  if (info.st_size == 0) throw trace_error(path + ": empty file, expected a trace");
  return info.st_size;
}

void throw_fault(const data_fault& fault) { throw trace_error(fault.text); }

std::vector<float> widen(const std::vector<half_bits>& halves) {
  std::vector<float> values(halves.size());
  std::transform(halves.begin(), halves.end(), values.begin(), half_to_float);
  return values;
}

}  // namespace

struct reader::impl {
  std::string path;
  open_options options;
  std::int64_t bytes = 0;
  h5::handle file;
  structure layout;
  std::vector<sequence_info> sequences;

  // Datasets stay open, so that their chunk caches serve row-wise scans; the least recently used
  // are closed beyond this many bytes of cache.
  static constexpr std::int64_t cache_limit = std::int64_t{512} << 20;
  struct opened {
    std::string path;
    h5::dataset data;
  };
  std::list<opened> open;  // most recent first
  std::int64_t cached = 0;

  impl(const std::string& file_path, open_options open_as) : path(file_path), options(open_as) {
    bytes = check_file(path);
    const h5::session guard;
    file = h5::open_read_only(path);
    layout = read_structure(h5::root(file.get(), path), options, bytes);
    for (const sequence_entry& s : layout.sequences) sequences.push_back(s.info);
  }

  ~impl() {
    const h5::session guard;
    open.clear();
    file.reset();
  }

  const sequence_entry& entry(int sequence) const {
    for (const sequence_entry& s : layout.sequences) {
      if (s.info.id == sequence) return s;
    }
    throw trace_error(fmt::format("{}: no sequence {}, expected one of {}", path, sequence,
                                  layout.sequences.size()));
  }

  const layer_entry& entry(int sequence, int layer) const {
    const sequence_entry& s = entry(sequence);
    const auto at = s.layers.find(layer);
    if (at == s.layers.end()) {
      throw trace_error(fmt::format("{}: {}: layer {} was not recorded", path, s.path, layer));
    }
    return at->second;
  }

  // Call inside a session; valid until the next call.
  const h5::dataset& dataset(const std::string& name) {
    const auto at =
        std::find_if(open.begin(), open.end(), [&](const opened& one) { return one.path == name; });
    if (at != open.end()) {
      open.splice(open.begin(), open, at);
      return open.front().data;
    }
    open.push_front({name, h5::root(file.get(), path).open_dataset(name)});
    cached += open.front().data.cache_bytes();
    while (cached > cache_limit && open.size() > 1) {
      cached -= open.back().data.cache_bytes();
      open.pop_back();
    }
    return open.front().data;
  }

  void check_rows(const std::string& name, std::int64_t begin, std::int64_t end,
                  std::int64_t rows) const {
    if (begin < 0 || begin > end || end > rows) {
      throw trace_error(fmt::format("{}: {}: rows {} to {} asked for, expected rows within 0 to {}",
                                    path, name, begin, end, rows));
    }
  }

  std::vector<half_bits> halves(const std::string& name, std::int64_t begin, std::int64_t count) {
    const h5::session guard;
    const h5::dataset& data = dataset(name);
    std::vector<half_bits> values(static_cast<size_t>(count * data.row_values()));
    data.read_raw(begin, count, values.data());
    return values;
  }

  // float16 is read raw and widened here, outside the library's mutex.
  std::vector<float> floats(const std::string& name, std::int64_t begin, std::int64_t count) {
    std::vector<half_bits> raw;
    {
      const h5::session guard;
      const h5::dataset& data = dataset(name);
      const auto size = static_cast<size_t>(count * data.row_values());
      if (data.kind() != h5::element::float16) {
        std::vector<float> values(size);
        data.read(H5T_NATIVE_FLOAT, begin, count, values.data());
        return values;
      }
      raw.resize(size);
      data.read_raw(begin, count, raw.data());
    }
    return widen(raw);
  }

  std::vector<std::int32_t> tokens(const sequence_entry& s) {
    std::vector<std::int64_t> wide;
    {
      const h5::session guard;
      wide = dataset(s.path + "/tokens").read_integers(0, s.info.n_tokens);
    }
    std::vector<std::int32_t> values;
    values.reserve(wide.size());
    for (const std::int64_t token : wide) {
      if (token < 0 || token >= layout.model.vocab_size) {
        throw trace_error(fmt::format("{}: {}/tokens: step {}: token {}, expected 0 to {}", path,
                                      s.path, values.size(), token, layout.model.vocab_size - 1));
      }
      values.push_back(static_cast<std::int32_t>(token));
    }
    return values;
  }

  std::string where(const std::string& name) const { return path + ": " + name; }
};

reader::reader(const std::string& path, open_options options)
    : impl_(std::make_unique<impl>(path, options)) {}
reader::~reader() = default;
reader::reader(reader&&) noexcept = default;
reader& reader::operator=(reader&&) noexcept = default;

const std::string& reader::path() const { return impl_->path; }
bool reader::complete() const { return impl_->layout.complete; }
std::string reader::producer() const { return impl_->layout.producer; }
std::string reader::created() const { return impl_->layout.created; }
std::int64_t reader::file_bytes() const { return impl_->bytes; }
const model_info& reader::model() const { return impl_->layout.model; }
const std::vector<sequence_info>& reader::sequences() const { return impl_->sequences; }
const sequence_info& reader::sequence(int id) const { return impl_->entry(id).info; }
const layer_info& reader::layer(int sequence, int layer) const {
  return impl_->entry(sequence, layer).info;
}
std::string reader::layer_path(int sequence, int layer) const {
  return impl_->entry(sequence, layer).path;
}

std::string reader::fingerprint(int sequence) const {
  const sequence_entry& s = impl_->entry(sequence);
  if (!s.info.fingerprint.empty() && s.info.committed == s.info.n_tokens) {
    return s.info.fingerprint;
  }
  fingerprint_hash hash(model(), s.info.n_prompt, s.info.n_tokens);
  hash.add(impl_->tokens(s));
  for (const auto& [layer, entry] : s.layers) {
    if (entry.info.has_k && entry.info.has_v) {
      for (const std::int64_t row : sampled_rows(s.info.n_tokens)) {
        hash.add(impl_->halves(entry.path + "/k", row, 1));
        hash.add(impl_->halves(entry.path + "/v", row, 1));
      }
    } else {
      for (const std::int64_t row :
           sampled_rows(static_cast<std::int64_t>(entry.attn_pos.size()))) {
        hash.add(attention_row(sequence, layer, row));
      }
    }
  }
  return hash.hex();
}

std::vector<std::int32_t> reader::tokens(int sequence) const {
  return impl_->tokens(impl_->entry(sequence));
}

std::vector<float> reader::confidence(int sequence) const {
  const sequence_entry& s = impl_->entry(sequence);
  if (!s.info.has_confidence) return {};
  const std::string name = s.path + "/confidence";
  auto rows = impl_->floats(name, 0, static_cast<std::int64_t>(s.info.logit_pos.size()));
  if (impl_->options.check_data) {
    check_confidence(rows, s.info.logit_pos, impl_->where(name), throw_fault);
  }
  return rows;
}

std::vector<float> reader::logits(int sequence, std::int64_t begin, std::int64_t end) const {
  const sequence_entry& s = impl_->entry(sequence);
  if (!s.info.has_logits) return {};
  const std::string name = s.path + "/logits";
  const std::span positions(s.info.logit_pos);
  impl_->check_rows(name, begin, end, static_cast<std::int64_t>(positions.size()));
  auto rows = impl_->floats(name, begin, end - begin);
  if (impl_->options.check_data) {
    check_logits(rows,
                 positions.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                 model(), impl_->where(name), throw_fault);
  }
  return rows;
}

std::vector<float> reader::residual_final(int sequence, std::int64_t begin,
                                          std::int64_t end) const {
  const sequence_entry& s = impl_->entry(sequence);
  if (!s.info.has_residual_final) return {};
  const std::string name = s.path + "/residual_final";
  const std::span positions(s.info.logit_pos);
  impl_->check_rows(name, begin, end, static_cast<std::int64_t>(positions.size()));
  auto rows = impl_->floats(name, begin, end - begin);
  if (impl_->options.check_data) {
    check_finite(rows, model().hidden_size,
                 positions.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                 impl_->where(name), throw_fault);
  }
  return rows;
}

layer_slice reader::read_layer(int sequence, int layer, std::int64_t begin,
                               std::int64_t end) const {
  const layer_entry& entry = impl_->entry(sequence, layer);
  const layer_info& info = entry.info;
  impl_->check_rows(entry.path, begin, end, impl_->entry(sequence).info.n_tokens);
  layer_slice slice;
  slice.sequence = sequence;
  slice.layer = layer;
  slice.begin = begin;
  slice.end = end;
  slice.row_begin = std::min(std::max(begin, info.first_row), end);
  const std::int64_t row = slice.row_begin - info.first_row, rows = end - slice.row_begin;
  const std::int64_t n = end - begin;
  const auto at = [&](const char* name) { return entry.path + "/" + name; };
  if (info.has_q && rows > 0) slice.q = impl_->halves(at("q"), row, rows);
  if (info.has_k) slice.k = impl_->halves(at("k"), begin, n);
  if (info.has_v) slice.v = impl_->halves(at("v"), begin, n);
  if (info.has_o && rows > 0) slice.o = impl_->floats(at("o"), row, rows);
  if (info.has_lse && rows > 0) slice.lse = impl_->floats(at("lse"), row, rows);
  if (info.has_value_norm) slice.value_norm = impl_->floats(at("value_norm"), begin, n);
  if (info.has_residual_norm) slice.residual_norm = impl_->floats(at("residual_norm"), begin, n);
  if (info.has_retention) slice.retention = impl_->floats(at("retention"), begin, n);
  if (info.has_image_score) slice.image_score = impl_->floats(at("image_score"), begin, n);
  if (impl_->options.check_data) {
    check_slice(slice, model(), impl_->where(entry.path), throw_fault);
  }
  return slice;
}

std::vector<float> reader::column_sum(int sequence, int layer) const {
  const layer_entry& entry = impl_->entry(sequence, layer);
  if (!entry.info.has_column_sum) return {};
  const std::string name = entry.path + "/column_sum";
  auto sums = impl_->floats(name, 0, model().n_q_heads);
  if (impl_->options.check_data) {
    for (size_t i = 0; i < sums.size(); ++i) {
      if (std::isfinite(sums[i]) && sums[i] >= 0) continue;
      const auto prompt = static_cast<size_t>(impl_->entry(sequence).info.n_prompt);
      throw trace_error(fmt::format("{}: head {}, step {}: {}, expected a finite sum >= 0",
                                    impl_->where(name), i / prompt, i % prompt, sums[i]));
    }
  }
  return sums;
}

std::vector<std::int32_t> reader::attention_positions(int sequence, int layer) const {
  return impl_->entry(sequence, layer).attn_pos;
}

std::vector<half_bits> reader::attention_row(int sequence, int layer, std::int64_t row) const {
  const layer_entry& entry = impl_->entry(sequence, layer);
  const std::string name = entry.path + "/attn";
  impl_->check_rows(name, row, row + 1, static_cast<std::int64_t>(entry.attn_pos.size()));
  const std::int64_t n_tokens = impl_->entry(sequence).info.n_tokens;
  std::vector<half_bits> values(static_cast<size_t>(model().n_q_heads * n_tokens));
  {
    const h5::session guard;
    impl_->dataset(name).read_raw(row, 1, values.data(), n_tokens);
  }
  if (impl_->options.check_data) {
    check_attention(values, n_tokens, entry.attn_pos[static_cast<size_t>(row)],
                    !model().sinks.empty(), impl_->where(name), throw_fault);
  }
  return values;
}

std::vector<float> reader::wo(int layer) const {
  const auto at = impl_->layout.wo_paths.find(layer);
  if (at == impl_->layout.wo_paths.end()) return {};
  auto values = impl_->floats(at->second, 0, model().n_q_heads);
  if (impl_->options.check_data) {
    for (const float value : values) {
      if (!std::isfinite(value)) {
        throw trace_error(
            fmt::format("{}: {}, expected finite weights", impl_->where(at->second), value));
      }
    }
  }
  return values;
}

layer_cursor::layer_cursor(const reader& file, int sequence, std::int64_t rows)
    : file_(&file), sequence_(sequence), rows_(std::max<std::int64_t>(rows, 1)) {}

bool layer_cursor::next(layer_slice& slice) {
  const std::vector<int>& layers = file_->model().layers;
  if (index_ == layers.size()) return false;
  const std::int64_t n_tokens = file_->sequence(sequence_).n_tokens;
  const std::int64_t end = std::min(begin_ + rows_, n_tokens);
  slice = file_->read_layer(sequence_, layers[index_], begin_, end);
  begin_ = end;
  if (begin_ == n_tokens) {
    begin_ = 0;
    ++index_;
  }
  return true;
}

}  // namespace kvreplay::traces
