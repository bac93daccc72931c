#include "kernels/prompt_mass.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "kernels/inner_loops.hpp"

namespace kvreplay::kernels {
namespace {

constexpr int tile = 16;      // keys scored together: one lane each
constexpr int row_block = 8;  // query positions whose rows are held at once

// One layer's geometry as the loops need it.
struct layer_view {
  int q_heads, kv_heads, group, dim, window;
  float softmax_scale;
  const float* sinks;  // [q_heads] or null
};

layer_view view_of(const cache_shape& shape, int layer) {
  if (layer < 0 || layer >= shape.layers) {
    throw std::out_of_range(fmt::format("prompt mass: layer {} of {} layers", layer, shape.layers));
  }
  const std::int64_t first_sink = std::int64_t{layer} * shape.q_heads;
  return {shape.q_heads,
          shape.kv_heads,
          shape.group(),
          shape.head_dim,
          shape.window_of(layer),
          static_cast<float>(shape.softmax_scale),
          shape.sink_logits.empty() ? nullptr : shape.sink_logits.data() + first_sink};
}

std::int64_t first_visible(const layer_view& v, std::int64_t position) {
  return v.window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - v.window);
}

// The keys of one KV head, transposed in tiles so that `tile` dot products advance together:
// [tiles, dim, tile], zero beyond n.   k [n, kv_heads, dim]
std::vector<float> pack_keys(const layer_view& v, const float* k, int head, std::int64_t n) {
  const std::int64_t tiles = (n + tile - 1) / tile;
  std::vector<float> packed(static_cast<std::size_t>(tiles * v.dim * tile), 0.0F);
  for (std::int64_t i = 0; i < n; ++i) {
    const float* row = k + row_offset(i, v.kv_heads, head, v.dim);
    float* to = packed.data() + i / tile * v.dim * tile + i % tile;
    for (int c = 0; c < v.dim; ++c) to[std::int64_t{c} * tile] = row[c];
  }
  return packed;
}

// A block of query positions of one KV head.
struct query_block {
  const float* q;      // [steps, q_heads, dim]
  const float* lse;    // [steps, q_heads] or null: computed
  float* lse_out;      // likewise, or null: not wanted
  std::int64_t first;  // position of the block's first row
  std::int64_t steps;
};

std::int64_t padded(std::int64_t n) { return (n + tile - 1) / tile * tile; }

// Probabilities of one query row in row[begin..end); row has room up to padded(end).
void finish_row(const layer_view& v, const query_block& b, std::int64_t step, int q_head,
                std::int64_t begin, std::int64_t end, float* row) {
  const std::int64_t at = step * v.q_heads + q_head;
  if (b.lse != nullptr) {
    active_loops().exponentials(row + begin, end - begin, b.lse[at]);
    return;
  }
  const float* sink = v.sinks == nullptr ? nullptr : v.sinks + q_head;
  const float lse = active_loops().softmax(row + begin, end - begin, sink);
  if (b.lse_out != nullptr) b.lse_out[at] = lse;
}

// out [steps, group, stride]: probability rows of the block, 0 where a row cannot see; columns from
// padded(first + steps) on are not written. `q_scaled` is scratch.
void block_rows(const layer_view& v, const std::vector<float>& packed, int head,
                const query_block& b, std::int64_t stride, float* out,
                std::vector<float>& q_scaled) {
  const std::int64_t rows = b.steps * v.group;
  q_scaled.resize(static_cast<std::size_t>(rows * v.dim));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t q_head = std::int64_t{head} * v.group + r % v.group;
    const float* from = b.q + row_offset(r / v.group, v.q_heads, q_head, v.dim);
    for (int c = 0; c < v.dim; ++c) {
      q_scaled[static_cast<std::size_t>(r * v.dim + c)] = from[c] * v.softmax_scale;
    }
  }
  const std::int64_t first_tile = first_visible(v, b.first) / tile;
  const std::int64_t last_tile = (b.first + b.steps + tile - 1) / tile;
  for (std::int64_t t = first_tile; t < last_tile; ++t) {
    const float* keys = packed.data() + t * v.dim * tile;
    active_loops().score_tile(q_scaled.data(), rows, keys, v.dim, out + t * tile, stride);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t position = b.first + r / v.group;
    const std::int64_t begin = first_visible(v, position), end = position + 1;
    float* row = out + r * stride;
    finish_row(v, b, r / v.group, head * v.group + static_cast<int>(r % v.group), begin, end, row);
    std::fill(row, row + begin, 0.0F);
    std::fill(row + end, row + padded(b.first + b.steps), 0.0F);
  }
}

// Calls take(step, rows [group, stride]) for every query position of one KV head, in order; rows
// hold probabilities up to the position and zeros where the query cannot see.
template <class Take>
void each_row(const layer_view& v, const query_block& all, const float* k, int head,
              std::vector<float>& buffer, Take take) {
  const std::int64_t n = all.first + all.steps;
  const std::vector<float> packed = pack_keys(v, k, head, n);
  const std::int64_t stride = padded(n);
  buffer.resize(static_cast<std::size_t>(row_block * v.group * stride));
  std::vector<float> q_scaled;
  for (std::int64_t s = 0; s < all.steps; s += row_block) {
    const std::int64_t offset = s * v.q_heads;
    const query_block b{all.q + offset * v.dim, all.lse == nullptr ? nullptr : all.lse + offset,
                        all.lse_out == nullptr ? nullptr : all.lse_out + offset, all.first + s,
                        std::min<std::int64_t>(row_block, all.steps - s)};
    block_rows(v, packed, head, b, stride, buffer.data(), q_scaled);
    for (std::int64_t i = 0; i < b.steps; ++i) {
      take(s + i, buffer.data() + i * v.group * stride, stride);
    }
  }
}

bool reduces(mass_layout layout) {
  return layout == mass_layout::mean || layout == mass_layout::max || layout == mass_layout::sum ||
         layout == mass_layout::layer_mean;
}

// Adds one query position's reduced mass of a KV head. The mean over the layer is the sum of its
// KV heads' sums, divided at the end.   rows [group] of `stride`, columns [begin, end)
void add_reduced(const float* rows, int group, std::int64_t stride, std::int64_t begin,
                 std::int64_t end, mass_layout reduce, double* sums) {
  if (reduce == mass_layout::max) {
    for (std::int64_t i = begin; i < end; ++i) {
      float best = rows[i];
      for (int g = 1; g < group; ++g) best = std::max(best, rows[g * stride + i]);
      sums[i] += static_cast<double>(best);
    }
    return;
  }
  for (int g = 0; g < group; ++g) {
    const float* row = rows + g * stride;
    for (std::int64_t i = begin; i < end; ++i) sums[i] += static_cast<double>(row[i]);
  }
}

// sums [kv_heads, n] of add_reduced -> out, times `factor` and the reduction's own divisor.
void finish_sums(const layer_view& v, mass_layout reduce, std::int64_t n, std::vector<double>& sums,
                 std::vector<float>& out) {
  double divisor = 1;
  if (reduce == mass_layout::mean) divisor = v.group;
  if (reduce == mass_layout::layer_mean) {
    divisor = v.q_heads;
    for (int h = 1; h < v.kv_heads; ++h) {
      for (std::int64_t i = 0; i < n; ++i) {
        sums[static_cast<std::size_t>(i)] += sums[static_cast<std::size_t>(h * n + i)];
      }
    }
    for (int h = 1; h < v.kv_heads; ++h) std::copy_n(sums.begin(), n, sums.begin() + h * n);
  }
  out.resize(sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) out[i] = static_cast<float>(sums[i] / divisor);
}

void check_rows(const prompt_rows& rows) {
  if (rows.q == nullptr || rows.k == nullptr) {
    throw std::invalid_argument("prompt mass: no q or no k");
  }
  if (rows.n_prompt < 1 || rows.first_row < 0 || rows.first_row >= rows.n_prompt) {
    throw std::invalid_argument(
        fmt::format("prompt mass: rows {} .. {} of the prompt", rows.first_row, rows.n_prompt));
  }
}

void check_reduction(mass_layout reduce) {
  if (!reduces(reduce)) {
    throw std::invalid_argument("prompt mass: expected mean, max, sum or layer_mean");
  }
}

}  // namespace

void column_sums(const cache_shape& shape, int layer, const prompt_rows& rows, mass_layout reduce,
                 std::vector<float>& out) {
  check_rows(rows);
  check_reduction(reduce);
  if (rows.first_row != 0) {
    throw std::invalid_argument(
        fmt::format("prompt mass: column sums need all prompt rows of q, the first given is {}",
                    rows.first_row));
  }
  const layer_view v = view_of(shape, layer);
  const std::int64_t n = rows.n_prompt;
  std::vector<double> sums(static_cast<std::size_t>(v.kv_heads * n), 0.0);
  std::vector<float> buffer;
  for (int h = 0; h < v.kv_heads; ++h) {
    each_row(v, {rows.q, rows.lse, nullptr, 0, n}, rows.k, h, buffer,
             [&](std::int64_t step, const float* p, std::int64_t stride) {
               add_reduced(p, v.group, stride, first_visible(v, step), step + 1, reduce,
                           sums.data() + h * n);
               // Rows cost what they see: the work done grows with their square.
               if (!rows.progress || step % 256 != 255) return;
               const double done = static_cast<double>(step + 1) / static_cast<double>(n);
               rows.progress((h + done * done) / v.kv_heads);
             });
  }
  finish_sums(v, reduce, n, sums, out);
}

void last_rows(const cache_shape& shape, int layer, const prompt_rows& rows, std::int64_t n,
               std::vector<float>& out) {
  check_rows(rows);
  const std::int64_t count = std::clamp<std::int64_t>(n, 0, rows.n_prompt - rows.first_row);
  const std::int64_t first = rows.n_prompt - count;
  const std::int64_t skipped = (first - rows.first_row) * shape.q_heads;
  out.resize(static_cast<std::size_t>(count * shape.q_heads * rows.n_prompt));
  full_rows(shape, layer, rows.q + skipped * shape.head_dim, rows.k,
            rows.lse == nullptr ? nullptr : rows.lse + skipped, first, count, rows.n_prompt,
            out.data(), nullptr);
}

void mean_of_rows(const cache_shape& shape, int layer, std::span<const float> rows, std::int64_t n,
                  std::int64_t n_prompt, mass_layout reduce, std::vector<float>& out) {
  check_reduction(reduce);
  const layer_view v = view_of(shape, layer);
  if (n < 1 || n > n_prompt || rows.size() != static_cast<std::size_t>(n * v.q_heads * n_prompt)) {
    throw std::invalid_argument(
        fmt::format("prompt mass: {} values for {} rows of {} query heads and {} positions",
                    rows.size(), n, v.q_heads, n_prompt));
  }
  std::vector<double> sums(static_cast<std::size_t>(v.kv_heads * n_prompt), 0.0);
  std::vector<std::int64_t> seen(static_cast<std::size_t>(n_prompt), 0);
  for (std::int64_t r = 0; r < n; ++r) {
    const std::int64_t position = n_prompt - n + r;
    const std::int64_t begin = first_visible(v, position);
    for (std::int64_t i = begin; i <= position; ++i) ++seen[static_cast<std::size_t>(i)];
    for (int h = 0; h < v.kv_heads; ++h) {
      const float* block = rows.data() + (r * v.q_heads + std::int64_t{h} * v.group) * n_prompt;
      add_reduced(block, v.group, n_prompt, begin, position + 1, reduce,
                  sums.data() + h * n_prompt);
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto count = seen[i % static_cast<std::size_t>(n_prompt)];
    if (count > 0) sums[i] /= static_cast<double>(count);
  }
  finish_sums(v, reduce, n_prompt, sums, out);
}

void full_rows(const cache_shape& shape, int layer, const float* q, const float* k,
               const float* lse, std::int64_t first, std::int64_t steps, std::int64_t stride,
               float* rows, float* lse_out) {
  const layer_view v = view_of(shape, layer);
  if (first < 0 || steps < 0 || stride < first + steps) {
    throw std::invalid_argument(fmt::format("prompt mass: rows {} .. {} do not fit a stride of {}",
                                            first, first + steps, stride));
  }
  if (steps == 0) return;
  if (q == nullptr || k == nullptr || rows == nullptr) {
    throw std::invalid_argument("prompt mass: no q, no k or no room for the rows");
  }
  std::vector<float> buffer;
  for (int h = 0; h < v.kv_heads; ++h) {
    each_row(v, {q, lse, lse_out, first, steps}, k, h, buffer,
             [&](std::int64_t step, const float* p, std::int64_t from_stride) {
               for (int g = 0; g < v.group; ++g) {
                 const std::int64_t row = step * v.q_heads + std::int64_t{h} * v.group + g;
                 float* to = rows + row * stride;
                 std::copy_n(p + g * from_stride, first + step + 1, to);
                 std::fill(to + first + step + 1, to + stride, 0.0F);
               }
             });
  }
}

}  // namespace kvreplay::kernels
