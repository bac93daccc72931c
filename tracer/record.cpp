#include "tracer/record.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "kernels/confidence.hpp"
#include "kernels/half.hpp"
#include "tracer/full_attention.hpp"
#include "tracer/record_plan.hpp"
#include "tracer/sampling.hpp"
#include "traces/writer.hpp"

namespace kvreplay::tracer {
namespace {

using kernels::half_bits;

constexpr std::int64_t logit_tile = 256;  // rows of logits held at once

// Where a row of values belongs, for complaints. layer -1: the values belong to no layer.
struct value_place {
  const char* name;
  int layer;
  std::int64_t first;  // position of the first row
  std::int64_t width;  // values per row
};

[[noreturn]] void complain(const value_place& place, size_t index, float value) {
  const std::string layer = place.layer < 0 ? "" : fmt::format("layer {}, ", place.layer);
  const std::int64_t step = place.first + static_cast<std::int64_t>(index) / place.width;
  throw model_error(fmt::format("{}step {}: {} holds {}, {}", layer, step, place.name, value,
                                std::isfinite(value)
                                    ? "beyond float16's largest, 65504; the trace stores 16 bits"
                                    : "expected finite values"));
}

std::vector<half_bits> to_half(std::span<const float> values, const value_place& place) {
  std::vector<half_bits> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    out[i] = kernels::float_to_half(values[i]);
    if (!kernels::is_finite_half(out[i])) complain(place, i, values[i]);
  }
  return out;
}

void widen(const std::vector<half_bits>& from, std::span<float> to) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = kernels::half_to_float(from[i]);
}

void require_finite(std::span<const float> values, const value_place& place) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) complain(place, i, values[i]);
  }
}

// Keys and values of one layer, [positions, n_kv_heads, head_dim], as attention reads them.
struct layer_cache {
  std::vector<float> k, v;
  std::vector<double> column_sum;  // [n_q_heads, n_prompt] or empty
};

std::uint64_t free_bytes(const std::string& path) {
  const auto folder = std::filesystem::absolute(path).parent_path();
  std::error_code error;
  const auto space = std::filesystem::space(folder, error);
  if (error) throw model_error(fmt::format("{}: {}", folder.string(), error.message()));
  return space.available;
}

class recorder {
 public:
  recorder(const model& m, const std::string& path, const record_options& options,
           const std::function<void(const record_progress&)>& progress)
      : model_(m), options_(options), progress_(progress), plan_(plan_of(m, options)), path_(path) {
    require_space(path, traces::projected_bytes(plan_.model, plan_.sequence), free_bytes(path));
    writer_ = std::make_unique<traces::writer>(
        path, plan_.model, options.producer.empty() ? "kvreplay" : options.producer);
    tokens_ = options.tokens;
    caches_.resize(static_cast<size_t>(m.config().n_layers));
    const auto values = static_cast<size_t>(plan_.sequence.n_tokens * kv_width());
    for (layer_cache& cache : caches_) {
      cache.k.resize(values);
      cache.v.resize(values);
    }
  }

  record_summary run() {
    const auto start = std::chrono::steady_clock::now();
    put_wo();
    writer_->begin_sequence(plan_.sequence);
    if (options_.stepwise) {
      run_steps(0);
    } else if (options_.generate) {
      run_blocks(plan_.sequence.n_prompt);
      run_steps(plan_.sequence.n_prompt);
    } else {
      run_blocks(plan_.sequence.n_tokens);
    }
    writer_->end_sequence();
    writer_->finish();
    record_summary out;
    out.positions = plan_.sequence.n_tokens;
    out.bytes = static_cast<std::int64_t>(std::filesystem::file_size(path_));
    out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    out.generated.assign(tokens_.begin() + static_cast<std::ptrdiff_t>(options_.tokens.size()),
                         tokens_.end());
    return out;
  }

 private:
  static record_plan plan_of(const model& m, const record_options& options) {
    record_plan plan = plan_recording(m.config(), options);
    plan.model.model_fingerprint = m.fingerprint();
    return plan;
  }

  std::int64_t kv_width() const {
    return std::int64_t{model_.config().n_kv_heads} * model_.config().head_dim;
  }

  bool recorded(int layer) const {
    return std::binary_search(plan_.model.layers.begin(), plan_.model.layers.end(), layer);
  }

  void put_wo() {
    for (const int layer : plan_.model.wo_layers) {
      const std::vector<float> wo = model_.wo(layer);
      to_half(wo, {"wo", layer, 0, static_cast<std::int64_t>(wo.size())});  // for its complaint
      writer_->put_wo(layer, wo);
    }
  }

  void run_blocks(std::int64_t end) {
    for (std::int64_t first = 0; first < end; first += options_.block) {
      const std::int64_t rows = std::min<std::int64_t>(options_.block, end - first);
      run_rows(first, rows);
      writer_->commit(first + rows);
      report(first + rows);
    }
  }

  void run_steps(std::int64_t first) {
    for (std::int64_t t = first; t < plan_.sequence.n_tokens; ++t) {
      run_rows(t, 1);
      if ((t + 1 - first) % options_.flush_every == 0) writer_->commit(t + 1);
      report(t + 1);
    }
  }

  void report(std::int64_t done) const {
    if (progress_) progress_({done, plan_.sequence.n_tokens});
  }

  // Positions first .. first + rows - 1 through the model and into the file.
  void run_rows(std::int64_t first, std::int64_t rows) {
    std::vector<std::int64_t> positions(static_cast<size_t>(rows));
    std::iota(positions.begin(), positions.end(), first);
    const auto ids =
        std::span(tokens_).subspan(static_cast<size_t>(first), static_cast<size_t>(rows));
    writer_->put_tokens(first, ids);
    const auto attend = [&](attention_block& block) { attend_and_put(block); };
    const auto after_layer = [&](int layer, std::span<const float> residual) {
      if (options_.with_residual && recorded(layer)) put_residual_norm(layer, first, residual);
    };
    const std::vector<float> residual = model_.forward(ids, positions, attend, after_layer);
    put_logit_rows(first, rows, residual);
  }

  full_attention_shape shape_of(int layer) const {
    const model_config& c = model_.config();
    return {c.n_q_heads,
            c.n_kv_heads,
            c.head_dim,
            c.head_dim,
            plan_.model.softmax_scale,
            c.window[static_cast<size_t>(layer)]};
  }

  void attend_and_put(attention_block& block) {
    const model_config& c = model_.config();
    const std::int64_t first = block.positions.front(),
                       q_width = std::int64_t{c.n_q_heads} * c.head_dim;
    const auto q = to_half(block.q, {"q", block.layer, first, q_width});
    const auto k = to_half(block.k, {"k", block.layer, first, kv_width()});
    const auto v = to_half(block.v, {"v", block.layer, first, kv_width()});
    if (!options_.kv_fp32) {
      widen(q, block.q);
      widen(k, block.k);
      widen(v, block.v);
    }
    layer_cache& cache = caches_[static_cast<size_t>(block.layer)];
    std::copy(block.k.begin(), block.k.end(), cache.k.begin() + first * kv_width());
    std::copy(block.v.begin(), block.v.end(), cache.v.begin() + first * kv_width());
    std::vector<float> lse(static_cast<size_t>(block.rows * c.n_q_heads));
    full_attention(shape_of(block.layer), first, block.rows, block.q.data(), cache.k.data(),
                   cache.v.data(), block.o.data(), lse.data());
    require_finite(lse, {"lse", block.layer, first, c.n_q_heads});
    require_finite(block.o, {"o", block.layer, first, q_width});
    if (!recorded(block.layer)) return;
    writer_->put_k(block.layer, first, k);
    writer_->put_v(block.layer, first, v);
    put_query_rows(block, q, lse);
    put_extras(block, lse);
  }

  // q, o and lse, from first_row on.
  void put_query_rows(const attention_block& block, std::span<const half_bits> q,
                      std::span<const float> lse) {
    const std::int64_t first = block.positions.front();
    const std::int64_t begin = std::max(first, plan_.sequence.first_row);
    if (begin >= first + block.rows) return;
    const auto skip = [&](std::int64_t width) {
      return static_cast<size_t>((begin - first) * width);
    };
    const std::int64_t heads = model_.config().n_q_heads;
    const std::int64_t width = heads * model_.config().head_dim;
    writer_->put_q(block.layer, begin, q.subspan(skip(width)));
    writer_->put_o(block.layer, begin, std::span<const float>(block.o).subspan(skip(width)));
    writer_->put_lse(block.layer, begin, lse.subspan(skip(heads)));
  }

  void put_extras(const attention_block& block, const std::vector<float>& lse) {
    const std::int64_t first = block.positions.front();
    if (options_.with_value_norm) {
      std::vector<float> norms;
      model_.value_norm(block.layer, block.v, block.rows, norms);
      writer_->put_value_norm(block.layer, first, norms);
    }
    if (plan_.sequence.column_sum) add_to_column_sum(block, lse);
    put_attention_rows(block, lse);
  }

  void add_to_column_sum(const attention_block& block, const std::vector<float>& lse) {
    const std::int64_t first = block.positions.front(), prompt = plan_.sequence.n_prompt;
    const std::int64_t rows = std::min(block.rows, prompt - first);
    if (rows <= 0) return;
    layer_cache& cache = caches_[static_cast<size_t>(block.layer)];
    cache.column_sum.resize(static_cast<size_t>(model_.config().n_q_heads * prompt));
    add_column_sums(shape_of(block.layer), first, rows, block.q.data(), cache.k.data(), lse.data(),
                    prompt, cache.column_sum.data());
    if (first + rows < prompt) return;
    const std::vector<float> sums(cache.column_sum.begin(), cache.column_sum.end());
    writer_->put_column_sum(block.layer, sums);
    cache.column_sum = {};
  }

  void put_attention_rows(const attention_block& block, const std::vector<float>& lse) {
    const auto& wanted = plan_.sequence.attn_pos;
    const std::int64_t heads = model_.config().n_q_heads, total = plan_.sequence.n_tokens;
    const std::int64_t width = heads * model_.config().head_dim;
    std::vector<float> row;
    for (std::int64_t r = 0; r < block.rows; ++r) {
      const std::int64_t position = block.positions[static_cast<size_t>(r)];
      const auto found = std::lower_bound(wanted.begin(), wanted.end(), position);
      if (found == wanted.end() || *found != position) continue;
      row.resize(static_cast<size_t>(heads * total));
      attention_probabilities(shape_of(block.layer), position, block.q.data() + r * width,
                              caches_[static_cast<size_t>(block.layer)].k.data(),
                              lse.data() + r * heads, total, row.data());
      writer_->put_attention(block.layer, found - wanted.begin(),
                             to_half(row, {"attn", block.layer, position, heads * total}));
    }
  }

  void put_residual_norm(int layer, std::int64_t first, std::span<const float> residual) {
    const auto hidden = static_cast<size_t>(model_.config().hidden_size);
    std::vector<float> norms;
    for (size_t begin = 0; begin < residual.size(); begin += hidden) {
      double squares = 0;
      for (const float x : residual.subspan(begin, hidden)) squares += double{x} * x;
      norms.push_back(static_cast<float>(std::sqrt(squares)));
    }
    require_finite(norms, {"residual_norm", layer, first, 1});
    writer_->put_residual_norm(layer, first, norms);
  }

  // Logits and what follows from them, for the rows from position P - 1 on.
  void put_logit_rows(std::int64_t first, std::int64_t rows, std::span<const float> residual) {
    const std::int64_t hidden = model_.config().hidden_size;
    const std::int64_t first_logit = plan_.sequence.n_prompt - 1;
    std::vector<float> logits;
    for (std::int64_t t = std::max(first, first_logit); t < first + rows; t += logit_tile) {
      const std::int64_t n = std::min(logit_tile, first + rows - t);
      const auto part = residual.subspan(static_cast<size_t>((t - first) * hidden),
                                         static_cast<size_t>(n * hidden));
      model_.logits(part, n, logits);
      require_finite(logits, {"logits", -1, t, model_.config().logit_size});
      writer_->put_confidence(t - first_logit, summarise(logits, n));
      if (options_.full_logits) writer_->put_logits(t - first_logit, logits);
      if (options_.with_residual) {
        if (!options_.kv_fp32)
          to_half(part, {"residual_final", -1, t, hidden});  // for its complaint
        writer_->put_residual_final(t - first_logit, part);
      }
      if (options_.generate) choose_next(t + n - 1, logits, n - 1);
    }
  }

  std::vector<float> summarise(const std::vector<float>& logits, std::int64_t rows) const {
    const model_config& c = model_.config();
    std::vector<float> out(static_cast<size_t>(rows * 4));
    tbb::parallel_for(std::int64_t{0}, rows, [&](std::int64_t r) {
      const auto row = std::span(logits).subspan(static_cast<size_t>(r * c.logit_size),
                                                 static_cast<size_t>(c.vocab_size));
      const kernels::logit_summary summary = kernels::summarise_logits(row);
      float* to = out.data() + r * 4;
      to[0] = summary.entropy;
      to[1] = summary.margin;
      to[2] = summary.top;
      to[3] = summary.lse;
    });
    return out;
  }

  void choose_next(std::int64_t position, const std::vector<float>& logits, std::int64_t row) {
    if (position + 1 >= plan_.sequence.n_tokens) return;
    const model_config& c = model_.config();
    const auto real = std::span(logits).subspan(static_cast<size_t>(row * c.logit_size),
                                                static_cast<size_t>(c.vocab_size));
    tokens_.push_back(
        choose_token(real, options_.temperature, uniform_at(options_.seed, position + 1)));
  }

  const model& model_;
  const record_options& options_;
  const std::function<void(const record_progress&)>& progress_;
  record_plan plan_;
  std::string path_;
  std::unique_ptr<traces::writer> writer_;
  std::vector<std::int32_t> tokens_;
  std::vector<layer_cache> caches_;  // [n_layers]
};

}  // namespace

record_summary record(const model& m, const std::string& path, const record_options& options,
                      const std::function<void(const record_progress&)>& progress) {
  recorder work(m, path, options, progress);
  try {
    return work.run();
  } catch (const model_error& e) {
    throw model_error(fmt::format("{}: {}", path, e.what()));
  }
}

}  // namespace kvreplay::tracer
