#include "traces/writer.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>

#include "traces/column.hpp"
#include "traces/fingerprint.hpp"
#include "traces/float16.hpp"
#include "traces/hdf5.hpp"
#include "traces/layout.hpp"

namespace kvreplay::traces {

namespace {

using h5::element;

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// An open file descriptor, used for the lock against a second writer and for fsync.
class descriptor {
 public:
  descriptor(const std::string& path, int flags) : fd_(::open(path.c_str(), flags, 0666)) {}
  ~descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  descriptor(const descriptor&) = delete;
  descriptor& operator=(const descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail_errno(const std::string& path, const char* what) {
  throw trace_error(fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
}

}  // namespace

struct writer::impl {
  std::string path, part;
  model_info model;
  std::unique_ptr<descriptor> lock;
  h5::handle file, sequences;
  h5::handle sequence, committed;
  int next_sequence = 0;
  bool in_sequence = false;
  sequence_plan plan;
  std::map<std::string, column> columns;
  std::vector<std::int32_t> tokens;
  std::map<std::string, std::vector<half_bits>> samples;  // "layers/3/k/17" -> raw row

  void open_part();
  void write_header(const std::string& producer);
  void write_model();
  void create_columns();
  void create_layer(int layer);
  column& at(const std::string& name);
  std::string layer_name(int layer, const char* name) const;
  void put_halves(const std::string& name, std::int64_t row, std::span<const half_bits> values);
  void put_floats(const std::string& name, std::int64_t row, std::span<const float> values,
                  bool allow_infinities = false);
  void keep_samples(const std::string& name, std::int64_t first, std::span<const half_bits> rows);
  std::int64_t rows_needed(row_axis axis, std::int64_t n) const;
  std::string fingerprint() const;
  void flush() const;
  void close_part() noexcept;
  std::string where(const std::string& name) const {
    return in_sequence ? fmt::format("{}: sequences/{}/{}", part, next_sequence - 1, name)
                       : fmt::format("{}: {}", part, name);
  }
};

void writer::impl::open_part() {
  lock = std::make_unique<descriptor>(part, O_RDWR | O_CREAT | O_CLOEXEC);
  if (lock->get() < 0) fail_errno(part, "cannot create the file");
  // Where the file system has locks, a second writer of the same name is told so.
  if (::flock(lock->get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw trace_error(part + ": another process is writing this file");
  }
  const h5::handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  if (!access || H5Pset_file_locking(access.get(), false, true) < 0) {
    h5::fail(part, "cannot set the access properties");
  }
  file = h5::handle(H5Fcreate(part.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()), H5Fclose);
  if (!file) h5::fail(part, "cannot create the file");
}

void writer::impl::write_header(const std::string& producer) {
  const h5::handle root(H5Gopen2(file.get(), "/", H5P_DEFAULT), H5Gclose);
  write_text(root.get(), "format", "kvtrace", part);
  write_number<std::uint32_t>(root.get(), "version", format_version, part);
  write_number<std::uint8_t>(root.get(), "complete", 0, part);
  write_text(root.get(), "producer", producer, part);
  write_text(root.get(), "created", utc_now(), part);
  write_model();
  sequences = create_group(file.get(), "sequences", part);
  flush();
}

void writer::impl::write_model() {
  const std::string at = part + ": model";
  const h5::handle group = create_group(file.get(), "model", part);
  const hid_t id = group.get();
  write_text(id, "name", model.name, at);
  write_text(id, "architecture", model.architecture, at);
  for (const auto& [name, value] :
       {std::pair{"n_layers", model.n_layers}, std::pair{"n_q_heads", model.n_q_heads},
        std::pair{"n_kv_heads", model.n_kv_heads}, std::pair{"head_dim", model.head_dim},
        std::pair{"value_dim", model.value_dim}, std::pair{"hidden_size", model.hidden_size},
        std::pair{"vocab_size", model.vocab_size}, std::pair{"logit_size", model.logit_size}}) {
    write_number<std::int32_t>(id, name, value, at);
  }
  write_number<double>(id, "softmax_scale", model.softmax_scale, at);
  write_text(id, "rope", model.rope, at);
  write_number<std::int32_t>(id, "rope_dim", model.rope_dim, at);
  write_text(id, "key_rotation", model.key_rotation, at);
  if (model.score_softcap != 0) write_number(id, "score_softcap", model.score_softcap, at);
  for (const auto& [name, text] : {std::pair{"compute_dtype", &model.compute_dtype},
                                   std::pair{"cache_dtype", &model.cache_dtype},
                                   std::pair{"model_fingerprint", &model.model_fingerprint}}) {
    if (!text->empty()) write_text(id, name, *text, at);
  }
  const std::int64_t n = model.n_layers;
  write_array<int>(id, "layers", {static_cast<std::int64_t>(model.layers.size())}, model.layers,
                   at);
  write_array<int>(id, "window", {n}, model.window, at);
  if (!model.sinks.empty()) write_array<float>(id, "sinks", {n, model.n_q_heads}, model.sinks, at);
  if (!model.rope_inv_freq.empty()) {
    write_array<double>(id, "rope_inv_freq", {model.rope_inv_freq_rows, model.rope_dim / 2},
                        model.rope_inv_freq, at);
  }
}

void writer::impl::flush() const {
  if (H5Fflush(file.get(), H5F_SCOPE_GLOBAL) < 0) {
    h5::fail(part, "cannot flush: is the disk full?");
  }
}

// Closes what is not finished. HDF5 cannot close a file whose data it cannot write (a full disk):
// such a file is left open, and its length is set to what its header already says, so that the
// committed part can be recovered.
void writer::impl::close_part() noexcept {
  if (!file || H5Fflush(file.get(), H5F_SCOPE_GLOBAL) >= 0) return;
  haddr_t end = 0;
  struct stat found {};
  if (H5Fget_eoa(file.get(), &end) >= 0 && ::fstat(lock->get(), &found) == 0 &&
      static_cast<haddr_t>(found.st_size) < end) {
    // Where even this fails, the file stays cut and the reader says so.
    [[maybe_unused]] const int longer = ::ftruncate(lock->get(), static_cast<off_t>(end));
  }
  for (auto& [name, one] : columns) one.abandon();
  for (h5::handle* handle : {&committed, &sequence, &sequences, &file}) handle->abandon();
}

std::string writer::impl::layer_name(int layer, const char* name) const {
  return fmt::format("layers/{}/{}", layer, name);
}

column& writer::impl::at(const std::string& name) {
  const auto found = columns.find(name);
  if (found == columns.end()) {
    throw trace_error(fmt::format("{}: not planned for this sequence", where(name)));
  }
  return found->second;
}

void writer::impl::create_layer(int layer) {
  const std::string name = fmt::format("layers/{}", layer);
  const h5::handle group = create_group(sequence.get(), name, where("layers"));
  if (plan.first_row > 0) {
    write_number<std::uint64_t>(group.get(), "first_row",
                                static_cast<std::uint64_t>(plan.first_row), where(name));
  }
  for (const planned_column& one : plan_layer(model, plan)) {
    const std::string full = name + "/" + one.name;
    columns.emplace(full, column(sequence.get(), full, one, where(full)));
  }
  if (!plan.attn_pos.empty()) {
    write_array<std::int32_t>(group.get(), "attn_pos",
                              {static_cast<std::int64_t>(plan.attn_pos.size())}, plan.attn_pos,
                              where(name));
  }
}

void writer::impl::create_columns() {
  for (const planned_column& one : plan_sequence(model, plan)) {
    columns.emplace(one.name, column(sequence.get(), one.name, one, where(one.name)));
  }
  const auto rows = static_cast<std::int64_t>(plan.logit_pos.size());
  write_array<std::int32_t>(sequence.get(), "logit_pos", {rows}, plan.logit_pos,
                            where("logit_pos"));
  const auto write_ranges = [&](hid_t parent, const std::string& name, const auto& ranges) {
    std::vector<std::int32_t> flat;
    for (const auto& [begin, end] : ranges) flat.insert(flat.end(), {begin, end});
    write_array<std::int32_t>(parent, name.c_str(), {static_cast<std::int64_t>(ranges.size()), 2},
                              flat, where(name));
  };
  if (!plan.chunks.empty()) write_ranges(sequence.get(), "chunks", plan.chunks);
  if (!plan.spans.empty()) {
    const h5::handle spans = create_group(sequence.get(), "spans", where("spans"));
    for (const auto& [name, ranges] : plan.spans) write_ranges(spans.get(), name, ranges);
  }
  const h5::handle layers = create_group(sequence.get(), "layers", where("layers"));
  for (const int layer : model.layers) create_layer(layer);
}

void writer::impl::put_halves(const std::string& name, std::int64_t row,
                              std::span<const half_bits> values) {
  column& to = at(name);
  const std::int64_t width = to.check_rows(row, values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (half_is_finite(values[i])) continue;
    throw trace_error(
        fmt::format("{}: step {}: {}, expected finite values (beyond float16's range?)", to.where(),
                    row + static_cast<std::int64_t>(i) / width, half_to_float(values[i])));
  }
  const h5::session guard;
  to.write(row, values.data(), values.size());
}

void writer::impl::put_floats(const std::string& name, std::int64_t row,
                              std::span<const float> values, bool allow_infinities) {
  column& to = at(name);
  const std::int64_t width = to.check_rows(row, values.size());
  std::vector<half_bits> narrow;
  if (to.kind() == element::float16) narrow.reserve(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    const bool good = std::isfinite(value) || (allow_infinities && std::isinf(value));
    if (!good || (to.kind() == element::float16 && !fits_half(value))) {
      throw trace_error(fmt::format(
          "{}: row {}: {}, expected {}", to.where(), row + static_cast<std::int64_t>(i) / width,
          value, good ? "values within float16's range (+-65504)" : "finite values"));
    }
    if (to.kind() == element::float16) narrow.push_back(float_to_half(value));
  }
  const h5::session guard;
  if (to.kind() == element::float16) {
    to.write(row, narrow.data(), narrow.size());
  } else {
    to.write(row, values.data(), values.size());
  }
}

void writer::impl::keep_samples(const std::string& name, std::int64_t first,
                                std::span<const half_bits> rows) {
  const auto width = static_cast<size_t>(at(name).width());
  const std::int64_t end = first + static_cast<std::int64_t>(rows.size() / width);
  const auto all = plan.kv ? plan.n_tokens : static_cast<std::int64_t>(plan.attn_pos.size());
  for (const std::int64_t row : sampled_rows(all)) {
    if (row < first || row >= end) continue;
    const auto one = rows.subspan(static_cast<size_t>(row - first) * width, width);
    samples[fmt::format("{}/{}", name, row)].assign(one.begin(), one.end());
  }
}

std::int64_t writer::impl::rows_needed(row_axis axis, std::int64_t n) const {
  const auto below = [n](const std::vector<std::int32_t>& positions) {
    return static_cast<std::int64_t>(std::lower_bound(positions.begin(), positions.end(), n) -
                                     positions.begin());
  };
  switch (axis) {
    case row_axis::position:
      return n;
    case row_axis::query:
      return std::max<std::int64_t>(n - plan.first_row, 0);
    case row_axis::logit_row:
      return below(plan.logit_pos);
    case row_axis::attention_row:
      return below(plan.attn_pos);
    case row_axis::head:
      return n >= plan.n_prompt ? model.n_q_heads : 0;
  }
  return n;
}

std::string writer::impl::fingerprint() const {
  fingerprint_hash hash(model, plan.n_prompt, plan.n_tokens);
  hash.add(tokens);
  const auto rows = plan.kv ? plan.n_tokens : static_cast<std::int64_t>(plan.attn_pos.size());
  const std::vector<const char*> names =
      plan.kv ? std::vector<const char*>{"k", "v"} : std::vector<const char*>{"attn"};
  for (const int layer : model.layers) {
    for (const std::int64_t row : sampled_rows(rows)) {
      for (const char* name : names) {
        hash.add(samples.at(fmt::format("{}/{}", layer_name(layer, name), row)));
      }
    }
  }
  return hash.hex();
}

writer::writer(const std::string& path, const model_info& model, const std::string& producer)
    : impl_(std::make_unique<impl>()) {
  impl_->path = path;
  impl_->part = path + ".part";
  impl_->model = model;
  model_info& own = impl_->model;
  if (own.rope_dim == 0) own.rope_dim = own.head_dim;
  if (own.layers.empty()) {
    for (int layer = 0; layer < own.n_layers; ++layer) own.layers.push_back(layer);
  }
  if (own.window.empty()) own.window.assign(static_cast<size_t>(own.n_layers), 0);
  check_model(own, impl_->part);
  const h5::session guard;
  impl_->open_part();
  impl_->write_header(producer);
}

writer::~writer() {
  const h5::session guard;
  impl_->close_part();
}

void writer::put_wo(int layer, std::span<const float> wo, bool float16) {
  const model_info& m = impl_->model;
  const std::string name = fmt::format("model/wo/{}", layer);
  const planned_column shape{name,
                             {m.n_q_heads, m.value_dim, m.hidden_size},
                             float16 ? element::float16 : element::float32,
                             row_axis::head};
  const std::string where = fmt::format("{}: {}", impl_->part, name);
  if (layer < 0 || layer >= m.n_layers) throw trace_error(where + ": no such layer in the model");
  const h5::session guard;
  if (!impl_->columns.emplace(name, column(impl_->file.get(), name, shape, where)).second) {
    throw trace_error(where + ": written twice");
  }
  impl_->put_floats(name, 0, wo);
  impl_->columns.erase(name);
}

int writer::begin_sequence(const sequence_plan& plan) {
  if (impl_->in_sequence) throw trace_error(impl_->part + ": the last sequence has not ended");
  check_plan(impl_->model, plan, impl_->part);
  impl_->plan = plan;
  impl_->tokens.assign(static_cast<size_t>(plan.n_tokens), -1);
  impl_->samples.clear();
  const int number = impl_->next_sequence++;
  impl_->in_sequence = true;
  const h5::session guard;
  const std::string at = fmt::format("{}: sequences/{}", impl_->part, number);
  impl_->sequence = create_group(impl_->sequences.get(), fmt::format("{}", number), at);
  const hid_t id = impl_->sequence.get();
  write_number(id, "n_prompt", static_cast<std::uint64_t>(plan.n_prompt), at);
  write_number(id, "n_tokens", static_cast<std::uint64_t>(plan.n_tokens), at);
  impl_->committed = write_number<std::uint64_t>(id, "committed", 0, at);
  for (const auto& [name, text] : {std::pair{"name", &plan.name}, std::pair{"task", &plan.task},
                                   std::pair{"source", &plan.source}}) {
    if (!text->empty()) write_text(id, name, *text, at);
  }
  if (plan.temperature) write_number(id, "temperature", *plan.temperature, at);
  if (plan.seed) write_number(id, "seed", *plan.seed, at);
  impl_->create_columns();
  impl_->flush();
  return number;
}

void writer::put_tokens(std::int64_t first, std::span<const std::int32_t> tokens) {
  column& to = impl_->at("tokens");
  to.check_rows(first, tokens.size());
  for (const std::int32_t token : tokens) {
    if (token >= 0 && token < impl_->model.vocab_size) continue;
    throw trace_error(fmt::format("{}: token {}, expected 0 to {}", to.where(), token,
                                  impl_->model.vocab_size - 1));
  }
  std::copy(tokens.begin(), tokens.end(), impl_->tokens.begin() + first);
  const h5::session guard;
  to.write(first, tokens.data(), tokens.size());
}

void writer::put_k(int layer, std::int64_t first, std::span<const half_bits> rows) {
  const std::string name = impl_->layer_name(layer, "k");
  impl_->put_halves(name, first, rows);
  impl_->keep_samples(name, first, rows);
}

void writer::put_v(int layer, std::int64_t first, std::span<const half_bits> rows) {
  const std::string name = impl_->layer_name(layer, "v");
  impl_->put_halves(name, first, rows);
  impl_->keep_samples(name, first, rows);
}

void writer::put_q(int layer, std::int64_t first, std::span<const half_bits> rows) {
  impl_->put_halves(impl_->layer_name(layer, "q"), first - impl_->plan.first_row, rows);
}

void writer::put_o(int layer, std::int64_t first, std::span<const float> rows) {
  impl_->put_floats(impl_->layer_name(layer, "o"), first - impl_->plan.first_row, rows);
}

void writer::put_lse(int layer, std::int64_t first, std::span<const float> rows) {
  impl_->put_floats(impl_->layer_name(layer, "lse"), first - impl_->plan.first_row, rows);
}

void writer::put_value_norm(int layer, std::int64_t first, std::span<const float> rows) {
  impl_->put_floats(impl_->layer_name(layer, "value_norm"), first, rows);
}

void writer::put_residual_norm(int layer, std::int64_t first, std::span<const float> rows) {
  impl_->put_floats(impl_->layer_name(layer, "residual_norm"), first, rows);
}

void writer::put_retention(int layer, std::int64_t first, std::span<const float> rows) {
  impl_->put_floats(impl_->layer_name(layer, "retention"), first, rows);
}

void writer::put_image_score(int layer, std::int64_t first, std::span<const float> rows) {
  impl_->put_floats(impl_->layer_name(layer, "image_score"), first, rows);
}

void writer::put_column_sum(int layer, std::span<const float> sums) {
  impl_->put_floats(impl_->layer_name(layer, "column_sum"), 0, sums);
}

void writer::put_attention(int layer, std::int64_t row, std::span<const half_bits> probabilities) {
  const std::string name = impl_->layer_name(layer, "attn");
  impl_->put_halves(name, row, probabilities);
  if (!impl_->plan.kv) impl_->keep_samples(name, row, probabilities);
}

void writer::put_confidence(std::int64_t first_row, std::span<const float> rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i % 4 == 1 || std::isfinite(rows[i])) continue;  // the margin alone may be infinite
    throw trace_error(fmt::format("{}: row {}: {}, expected finite values",
                                  impl_->where("confidence"),
                                  first_row + static_cast<std::int64_t>(i / 4), rows[i]));
  }
  impl_->put_floats("confidence", first_row, rows, true);
}

void writer::put_logits(std::int64_t first_row, std::span<const float> rows) {
  impl_->put_floats("logits", first_row, rows, true);
}

void writer::put_residual_final(std::int64_t first_row, std::span<const float> rows) {
  impl_->put_floats("residual_final", first_row, rows);
}

void writer::commit(std::int64_t n) {
  if (!impl_->in_sequence) throw trace_error(impl_->part + ": no sequence has begun");
  if (n < 0 || n > impl_->plan.n_tokens) {
    throw trace_error(fmt::format("{}: commit of {} positions, expected 0 to {}", impl_->part, n,
                                  impl_->plan.n_tokens));
  }
  for (const auto& [name, one] : impl_->columns) {
    const std::int64_t needed = impl_->rows_needed(one.axis(), n);
    if (one.rows_written() < needed) {
      throw trace_error(fmt::format("{}: {} rows written, expected {} to commit {} positions",
                                    one.where(), one.rows_written(), needed, n));
    }
  }
  const h5::session guard;
  impl_->flush();
  const auto value = static_cast<std::uint64_t>(n);
  if (H5Awrite(impl_->committed.get(), H5T_NATIVE_UINT64, &value) < 0) {
    h5::fail(impl_->part, "cannot write attribute committed");
  }
  impl_->flush();
}

void writer::end_sequence() {
  commit(impl_->plan.n_tokens);
  const h5::session guard;
  write_text(impl_->sequence.get(), "fingerprint", impl_->fingerprint(),
             impl_->where("fingerprint"));
  for (auto& [name, one] : impl_->columns) one.close();
  impl_->columns.clear();
  impl_->committed.reset();
  impl_->sequence.reset();
  impl_->flush();
  impl_->in_sequence = false;
}

void writer::finish() {
  if (impl_->in_sequence) throw trace_error(impl_->part + ": the last sequence has not ended");
  if (impl_->next_sequence == 0) throw trace_error(impl_->part + ": no sequence was written");
  {
    const h5::session guard;
    const h5::handle complete(H5Aopen(impl_->file.get(), "complete", H5P_DEFAULT), H5Aclose);
    const std::uint8_t one = 1;
    if (!complete || H5Awrite(complete.get(), H5T_NATIVE_UINT8, &one) < 0) {
      h5::fail(impl_->part, "cannot write attribute complete");
    }
  }
  {
    const h5::session guard;
    impl_->flush();
    impl_->sequences.reset();
    if (!impl_->file.reset()) h5::fail(impl_->part, "cannot close: is the disk full?");
  }
  if (::fsync(impl_->lock->get()) != 0) fail_errno(impl_->part, "cannot sync");
  if (std::rename(impl_->part.c_str(), impl_->path.c_str()) != 0) {
    fail_errno(impl_->part, "cannot rename to the final name");
  }
  const std::filesystem::path above = std::filesystem::path(impl_->path).parent_path();
  const std::string folder = above.empty() ? std::string(".") : above.string();
  const descriptor parent(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Some file systems cannot sync a folder (EINVAL); the file itself is safe by now.
  if (parent.get() >= 0 && ::fsync(parent.get()) != 0 && errno != EINVAL) {
    fail_errno(folder, "cannot sync the folder");
  }
}

std::int64_t projected_bytes(const model_info& model, const sequence_plan& plan) {
  std::int64_t bytes = std::int64_t{64} << 10;  // headers, attributes, chunk indices
  for (const planned_column& one : plan_sequence(model, plan)) bytes += stored_bytes(one);
  const std::int64_t layers =
      model.layers.empty() ? model.n_layers : static_cast<std::int64_t>(model.layers.size());
  for (const planned_column& one : plan_layer(model, plan)) bytes += layers * stored_bytes(one);
  // wo is written as float16 by default; what the model names is what will be put.
  const std::int64_t wo_values =
      std::int64_t{model.n_q_heads} * model.value_dim * model.hidden_size;
  return bytes + static_cast<std::int64_t>(model.wo_layers.size()) * wo_values * 2;
}

}  // namespace kvreplay::traces
