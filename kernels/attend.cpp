#include "kernels/attend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

#include "kernels/groups.hpp"
#include "kernels/inner_loops.hpp"

namespace kvreplay::kernels {
namespace {

constexpr int most_channels = 256;

struct scratch_space {
  const inner_loops* loops;
  std::vector<float> q,
      q_folded;  // [group, head_dim]: times the softmax scale; times the channel scales
  std::vector<float> scores;       // [group, entries], then the probabilities
  std::vector<float> weights;      // [group, entries] of one tier: what V rows are multiplied by
  std::vector<half_bits> scalars;  // [body entries], where they lie in pages
  grouped_rows grouped;            // of the head at hand, where the format has groups
  // Grouped entries as numbers, [up to block_rows, dim]. Aligned: no store crosses a cache line.
  alignas(64) float rows[grouped_rows::most_rows * most_channels];
};

constexpr int block_rows = grouped_rows::most_rows;

// One KV head of one item: what the loops need, as plain pointers.
struct head_work {
  const head_store* store;
  const payload_rows* rows;
  row_pages body_pages, tail_pages;
  bool half_tail, grouped;
  int group, head_dim, value_dim;
  float softmax_scale;
  const float* q;     // [group, head_dim]
  const float* sink;  // [group] or null
  float* o;           // [group, value_dim]
  float* lse;         // [group]
};

const float* none_if_empty(const std::vector<float>& table) {
  return table.empty() ? nullptr : table.data();
}

// One FP16 scalar per body entry, side by side in slot order; null: the format has none.
const half_bits* body_scalars(const head_work& w, const std::vector<half_bits>& stored,
                              std::vector<half_bits>& side_by_side) {
  if (stored.empty()) return nullptr;
  if (w.body_pages.table == nullptr) return stored.data();
  const std::int64_t n = w.store->body_size();
  side_by_side.resize(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n;) {
    const std::int64_t run = rows_together(w.body_pages, i, n - i);
    std::copy_n(stored.begin() + row_of(w.body_pages, i), run, side_by_side.begin() + i);
    i += run;
  }
  return side_by_side.data();
}

// out[c] = (q[c] * softmax_scale) * channel[c], rounded after each product; channel null: ones.
void fold_channels(const float* q, int dim, float softmax_scale, const float* channel, float* out) {
  for (int c = 0; c < dim; ++c) out[c] = q[c] * softmax_scale;
  if (channel == nullptr) return;
  for (int c = 0; c < dim; ++c) out[c] *= channel[c];
}

void fold_query(const head_work& w, scratch_space& s) {
  s.q.resize(static_cast<std::size_t>(w.group) * static_cast<std::size_t>(w.head_dim));
  s.q_folded.resize(s.q.size());
  for (int g = 0; g < w.group; ++g) {
    const std::int64_t row = std::int64_t{g} * w.head_dim;
    fold_channels(w.q + row, w.head_dim, w.softmax_scale, nullptr, s.q.data() + row);
    fold_channels(w.q + row, w.head_dim, w.softmax_scale, none_if_empty(w.store->k_channel_scale),
                  s.q_folded.data() + row);
  }
}

template <class Visit>
void for_each_block(std::int64_t n, Visit visit) {
  for (std::int64_t begin = 0; begin < n; begin += block_rows) {
    visit(begin, static_cast<int>(std::min<std::int64_t>(block_rows, n - begin)));
  }
}

void score_entries(const head_work& w, scratch_space& s) {
  const head_store& store = *w.store;
  const int body = store.body_size(), tail = store.tail_size();
  const std::int64_t n = store.size();
  fold_query(w, s);
  s.scores.resize(static_cast<std::size_t>(w.group * n));
  const float *q = s.q.data(), *folded = s.q_folded.data();
  if (body > 0 && w.grouped) {
    for_each_block(body, [&](std::int64_t begin, int count) {
      s.grouped.keys(begin, count, s.rows);
      s.loops->score_float(
          {q, w.group, w.head_dim, s.rows, nullptr, count, s.scores.data() + begin, n});
    });
  } else if (body > 0) {
    s.loops->score_int8({folded, w.group, w.head_dim, w.rows->body_k.data(),
                         body_scalars(w, w.rows->body_k_scale, s.scalars), body, s.scores.data(), n,
                         w.body_pages});
  }
  float* tail_scores = s.scores.data() + body;
  if (tail > 0 && w.half_tail) {
    s.loops->score_half({q, w.group, w.head_dim, w.rows->tail_k.data(), nullptr, tail, tail_scores,
                         n, w.tail_pages});
  } else if (tail > 0) {
    s.loops->score_float({q, w.group, w.head_dim, w.rows->tail_k32.data(), nullptr, tail,
                          tail_scores, n, w.tail_pages});
  }
}

// The body's part of o: token scalars go into the probabilities, channel scales into the sum.
void sum_body(const head_work& w, scratch_space& s) {
  const head_store& store = *w.store;
  const int body = store.body_size();
  const std::int64_t n = store.size();
  const float* weights = s.scores.data();
  if (w.grouped) {
    for_each_block(body, [&](std::int64_t begin, int count) {
      s.grouped.values(begin, count, s.rows);
      s.loops->add_float({weights + begin, n, w.group, w.value_dim, s.rows, count, w.o});
    });
    return;
  }
  if (const half_bits* scale = body_scalars(w, w.rows->body_v_scale, s.scalars); scale != nullptr) {
    s.weights.resize(static_cast<std::size_t>(w.group * n));
    for (int g = 0; g < w.group; ++g) {
      s.loops->times_halves(s.scores.data() + g * n, scale, body, s.weights.data() + g * n);
    }
    weights = s.weights.data();
  }
  s.loops->add_int8(
      {weights, n, w.group, w.value_dim, w.rows->body_v.data(), body, w.o, w.body_pages});
  const float* channel = none_if_empty(store.v_channel_scale);
  if (channel == nullptr) return;
  for (int g = 0; g < w.group; ++g) {
    float* out = w.o + std::int64_t{g} * w.value_dim;
    for (int c = 0; c < w.value_dim; ++c) out[c] *= channel[c];
  }
}

// Leaves the probabilities [group, entries] in s.scores.
void attend_head(const head_work& w, scratch_space& s) {
  const head_store& store = *w.store;
  const std::int64_t n = store.size();
  std::fill_n(w.o, std::int64_t{w.group} * w.value_dim, 0.0F);
  score_entries(w, s);
  for (int g = 0; g < w.group; ++g) {
    w.lse[g] =
        s.loops->softmax(s.scores.data() + g * n, n, w.sink == nullptr ? nullptr : w.sink + g);
  }
  if (store.body_size() > 0) sum_body(w, s);
  const int tail = store.tail_size();
  if (tail == 0) return;
  const float* p = s.scores.data() + store.body_size();
  if (w.half_tail) {
    s.loops->add_half({p, n, w.group, w.value_dim, w.rows->tail_v.data(), tail, w.o, w.tail_pages});
  } else {
    s.loops->add_float(
        {p, n, w.group, w.value_dim, w.rows->tail_v32.data(), tail, w.o, w.tail_pages});
  }
}

// out[i] over the rows of p [rows, n]: sum or max.
void reduce_rows(const float* p, int rows, std::int64_t n, bool largest, float* out) {
  std::copy_n(p, n, out);
  for (int g = 1; g < rows; ++g) {
    const float* row = p + g * n;
    if (largest) {
      for (std::int64_t i = 0; i < n; ++i) out[i] = out[i] < row[i] ? row[i] : out[i];
    } else {
      for (std::int64_t i = 0; i < n; ++i) out[i] += row[i];
    }
  }
}

void scale_row(float* row, std::int64_t n, float factor) {
  for (std::int64_t i = 0; i < n; ++i) row[i] *= factor;
}

// Writes or adds what KV head `h` contributes; p [group, n].
void store_mass(const attend_item& item, int h, int group, std::int64_t n, const float* p) {
  float* row = item.mass + h * item.mass_stride;
  switch (item.layout) {
    case mass_layout::none:
      return;
    case mass_layout::per_query_head:
      for (int g = 0; g < group; ++g) {
        std::copy_n(p + g * n, n, item.mass + (std::int64_t{h} * group + g) * item.mass_stride);
      }
      return;
    case mass_layout::mean:
    case mass_layout::sum:
    case mass_layout::max:
      reduce_rows(p, group, n, item.layout == mass_layout::max, row);
      if (item.layout == mass_layout::mean) scale_row(row, n, 1.0F / static_cast<float>(group));
      return;
    case mass_layout::layer_mean:
      reduce_rows(p, group, n, false, row);
      return;
  }
}

// Every KV head's row holds its group's sum: all become the mean over the layer's query heads.
void spread_layer_mean(const attend_item& item, std::int64_t n) {
  const cache_shape& shape = item.cache->shape();
  for (int h = 1; h < shape.kv_heads; ++h) {
    const float* row = item.mass + h * item.mass_stride;
    for (std::int64_t i = 0; i < n; ++i) item.mass[i] += row[i];
  }
  scale_row(item.mass, n, 1.0F / static_cast<float>(shape.q_heads));
  for (int h = 1; h < shape.kv_heads; ++h) {
    std::copy_n(item.mass, n, item.mass + h * item.mass_stride);
  }
}

void check_item(const attend_item& item) {
  if (item.cache == nullptr || item.q == nullptr || item.o == nullptr || item.lse == nullptr) {
    throw std::invalid_argument("attend: an item has no cache, q, o or lse");
  }
  const kv_cache& cache = *item.cache;
  const int most = cache.max_entries(item.layer);
  if (item.layout == mass_layout::none) return;
  if (item.mass == nullptr || item.mass_stride < most) {
    throw std::invalid_argument(
        fmt::format("attend: layer {}: mass is {}, its stride {}, expected at least {}", item.layer,
                    item.mass == nullptr ? "null" : "given", item.mass_stride, most));
  }
  if (item.layout != mass_layout::layer_mean) return;
  for (int h = 0; h < cache.shape().kv_heads; ++h) {
    if (cache.entries(item.layer, h) == most) continue;
    throw std::invalid_argument(fmt::format(
        "attend: layer {}: layer_mean over heads that hold {} and {} entries, expected one set",
        item.layer, cache.entries(item.layer, h), most));
  }
}

void attend_item_heads(const attend_item& item, scratch_space& scratch) {
  const kv_cache& cache = *item.cache;
  const cache_shape& shape = cache.shape();
  const int group = shape.group();
  for (int h = 0; h < shape.kv_heads; ++h) {
    const std::int64_t first = std::int64_t{h} * group;  // query head
    const float* sink = shape.sink_logits.empty()
                            ? nullptr
                            : shape.sink_logits.data() + std::int64_t{item.layer} * shape.q_heads;
    const head_work work{.store = &cache.head(item.layer, h),
                         .rows = &cache.payload(item.layer, h),
                         .body_pages = cache.rows_of(item.layer, h, tier::body),
                         .tail_pages = cache.rows_of(item.layer, h, tier::tail),
                         .half_tail = cache.format().tail == tail_format::fp16,
                         .grouped = is_grouped(cache.format()),
                         .group = group,
                         .head_dim = shape.head_dim,
                         .value_dim = shape.value_dim,
                         .softmax_scale = static_cast<float>(shape.softmax_scale),
                         .q = item.q + first * shape.head_dim,
                         .sink = sink == nullptr ? nullptr : sink + first,
                         .o = item.o + first * shape.value_dim,
                         .lse = item.lse + first};
    if (work.grouped) scratch.grouped.open(cache, item.layer, h);
    attend_head(work, scratch);
    store_mass(item, h, group, work.store->size(), scratch.scores.data());
  }
  if (item.layout == mass_layout::layer_mean) {
    spread_layer_mean(item, cache.max_entries(item.layer));
  }
}

}  // namespace

void attend(std::span<const attend_item> items) {
  scratch_space scratch;
  scratch.loops = &active_loops();
  for (const attend_item& item : items) {
    check_item(item);
    attend_item_heads(item, scratch);
  }
}

head_integers integer_scores(const kv_cache& cache, int layer, int q_head,
                             std::span<const float> q) {
  const cache_shape& shape = cache.shape();
  const head_store& store = cache.head(layer, q_head / shape.group());
  if (q_head < 0 || q.size() != static_cast<std::size_t>(shape.head_dim)) {
    throw std::invalid_argument(
        fmt::format("integer_scores: query head {} with {} channels, expected {}", q_head, q.size(),
                    shape.head_dim));
  }
  if (is_grouped(cache.format())) {
    throw std::invalid_argument("integer_scores: the format's scales are no part of the query");
  }
  std::vector<float> folded(q.size());
  fold_channels(q.data(), shape.head_dim, static_cast<float>(shape.softmax_scale),
                none_if_empty(store.k_channel_scale), folded.data());
  digit_row digits;
  split_query(folded.data(), shape.head_dim, digits);
  head_integers result{digits.scale, {}};
  result.scores.resize(store.body_position.size());
  const int head = q_head / shape.group();
  const payload_rows& rows = cache.payload(layer, head);
  const row_pages pages = cache.rows_of(layer, head, tier::body);
  for (std::int64_t i = 0, n = store.body_size(); i < n;) {
    const std::int64_t run = rows_together(pages, i, n - i);
    active_loops().digit_scores(digits, shape.head_dim,
                                rows.body_k.data() + row_of(pages, i) * shape.head_dim, run,
                                result.scores.data() + i);
    i += run;
  }
  return result;
}

}  // namespace kvreplay::kernels
