#include "tracer/full_attention.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tracer/blas.hpp"

namespace kvreplay::tracer {
namespace {

// Every product has this one shape, whatever a call asks for: 16 query rows of one KV head by 128
// keys whose block begins at a multiple of 128 positions. So a row's sums run in one order.
constexpr std::int64_t tile_rows = 16;
constexpr std::int64_t key_block = 128;
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

size_t index(std::int64_t i) { return static_cast<size_t>(i); }

// One call's arguments.
struct attention_call {
  full_attention_shape shape;
  std::int64_t first, rows;
  const float *q, *k, *v;

  std::int64_t group() const { return shape.q_heads / shape.kv_heads; }
  std::int64_t keys() const { return first + rows; }
  std::int64_t tiles() const { return (rows * group() + tile_rows - 1) / tile_rows; }
  std::int64_t first_visible(std::int64_t position) const {
    return shape.window == 0 ? 0 : std::max<std::int64_t>(0, position - shape.window + 1);
  }
};

// Up to 16 (row, query head) pairs that share a KV head, their scores against a block of keys.
class query_tile {
 public:
  query_tile(const attention_call& call, std::int64_t kv_head, std::int64_t tile)
      : call_(call),
        kv_head_(kv_head),
        begin_(tile * tile_rows),
        count_(std::min(tile_rows, call.rows * call.group() - begin_)),
        q_(index(tile_rows * call.shape.head_dim), 0.0f),
        padded_(index(key_block * std::max(call.shape.head_dim, call.shape.value_dim))),
        scores_(index(tile_rows * key_block)) {
    for (std::int64_t i = 0; i < count_; ++i) {
      std::copy_n(call.q + flat(i) * call.shape.head_dim, call.shape.head_dim,
                  q_.data() + i * call.shape.head_dim);
    }
  }

  std::int64_t count() const { return count_; }
  std::int64_t row(std::int64_t i) const { return (begin_ + i) / call_.group(); }
  std::int64_t head(std::int64_t i) const {
    return kv_head_ * call_.group() + (begin_ + i) % call_.group();
  }
  // Index of pair i in [rows, q_heads].
  std::int64_t flat(std::int64_t i) const { return row(i) * call_.shape.q_heads + head(i); }
  std::int64_t position(std::int64_t i) const { return call_.first + row(i); }
  std::int64_t first_block() const { return call_.first_visible(position(0)) / key_block; }
  std::int64_t last_block() const { return position(count_ - 1) / key_block; }

  // Scaled scores [16, 128] of the block, -inf where a row cannot see a key.
  float* score(std::int64_t block) {
    const std::int64_t dim = call_.shape.head_dim;
    const auto [keys, stride] = block_of(call_.k, dim, block);
    multiply_transposed({tile_rows, key_block, static_cast<int>(dim), dim, stride, key_block},
                        q_.data(), keys, scores_.data());
    const auto scale = static_cast<float>(call_.shape.softmax_scale);
    for (std::int64_t i = 0; i < count_; ++i) {
      float* s = scores_.data() + i * key_block;
      const std::int64_t low = call_.first_visible(position(i)) - block * key_block;
      const std::int64_t high = position(i) - block * key_block;  // the last one visible
      for (std::int64_t j = 0; j < key_block; ++j) {
        s[j] = j >= low && j <= high ? s[j] * scale : minus_infinity;
      }
    }
    return scores_.data();
  }

  // out [16, value_dim] = weights [16, 128] * values of the block.
  void weigh(std::int64_t block, const float* weights, float* out) {
    const std::int64_t dim = call_.shape.value_dim;
    const auto [values, stride] = block_of(call_.v, dim, block);
    multiply({tile_rows, static_cast<int>(dim), key_block, key_block, stride, dim}, weights, values,
             out);
  }

 private:
  // Rows of a block of k or v: in place where it is whole, else a copy padded with zeros.
  std::pair<const float*, std::int64_t> block_of(const float* from, std::int64_t dim,
                                                 std::int64_t block) {
    const std::int64_t stride = call_.shape.kv_heads * dim;
    const float* start = from + block * key_block * stride + kv_head_ * dim;
    const std::int64_t there = std::min(key_block, call_.keys() - block * key_block);
    if (there == key_block) return {start, stride};
    std::fill(padded_.begin(), padded_.end(), 0.0f);
    for (std::int64_t j = 0; j < there; ++j) {
      std::copy_n(start + j * stride, dim, padded_.data() + j * dim);
    }
    return {padded_.data(), dim};
  }

  const attention_call& call_;
  std::int64_t kv_head_, begin_, count_;
  std::vector<float> q_, padded_, scores_;
};

// Running softmax of a tile: maximum, sum and weighted values per pair.
struct softmax_state {
  std::vector<float> maximum, o;  // [16], [16, value_dim]
  std::vector<double> sum;        // [16]
};

// Turns a row's scores into weights relative to its new maximum and rescales what it had. A block
// that the row cannot see changes nothing.
void absorb_scores(softmax_state& state, std::int64_t i, float* scores, std::int64_t value_dim) {
  const float block_maximum = *std::max_element(scores, scores + key_block);
  if (block_maximum == minus_infinity) {
    std::fill_n(scores, key_block, 0.0f);
    return;
  }
  const float maximum = std::max(state.maximum[index(i)], block_maximum);
  const float rescale = std::exp(state.maximum[index(i)] - maximum);
  double sum = 0;
  for (std::int64_t j = 0; j < key_block; ++j) {
    scores[j] = std::exp(scores[j] - maximum);
    sum += scores[j];
  }
  state.maximum[index(i)] = maximum;
  state.sum[index(i)] = state.sum[index(i)] * rescale + sum;
  float* o = state.o.data() + i * value_dim;
  for (std::int64_t c = 0; c < value_dim; ++c) o[c] *= rescale;
}

void attend_tile(const attention_call& call, std::int64_t kv_head, std::int64_t tile_index,
                 float* o, float* lse) {
  query_tile tile(call, kv_head, tile_index);
  const std::int64_t dim = call.shape.value_dim;
  softmax_state state{std::vector<float>(index(tile_rows), minus_infinity),
                      std::vector<float>(index(tile_rows * dim), 0.0f),
                      std::vector<double>(index(tile_rows), 0.0)};
  std::vector<float> part(state.o.size());
  for (std::int64_t block = tile.first_block(); block <= tile.last_block(); ++block) {
    float* scores = tile.score(block);
    for (std::int64_t i = 0; i < tile.count(); ++i) {
      absorb_scores(state, i, scores + i * key_block, dim);
    }
    tile.weigh(block, scores, part.data());
    for (std::int64_t c = 0; c < tile.count() * dim; ++c) state.o[index(c)] += part[index(c)];
  }
  for (std::int64_t i = 0; i < tile.count(); ++i) {
    const double sum = state.sum[index(i)];
    for (std::int64_t c = 0; c < dim; ++c) {
      o[tile.flat(i) * dim + c] = static_cast<float>(state.o[index(i * dim + c)] / sum);
    }
    lse[tile.flat(i)] = static_cast<float>(state.maximum[index(i)] + std::log(sum));
  }
}

}  // namespace

void full_attention(const full_attention_shape& shape, std::int64_t first, std::int64_t rows,
                    const float* q, const float* k, const float* v, float* o, float* lse) {
  const attention_call call{shape, first, rows, q, k, v};
  const std::int64_t tiles = call.tiles();
  tbb::parallel_for(std::int64_t{0}, shape.kv_heads * tiles, [&](std::int64_t task) {
    attend_tile(call, task / tiles, task % tiles, o, lse);
  });
}

void add_column_sums(const full_attention_shape& shape, std::int64_t first, std::int64_t rows,
                     const float* q, const float* k, const float* lse, std::int64_t stride,
                     double* sums) {
  const attention_call call{shape, first, rows, q, k, nullptr};
  const std::int64_t blocks = (call.keys() + key_block - 1) / key_block;
  tbb::parallel_for(std::int64_t{0}, shape.kv_heads * blocks, [&](std::int64_t task) {
    const std::int64_t block = task % blocks;
    for (std::int64_t t = 0; t < call.tiles(); ++t) {
      query_tile tile(call, task / blocks, t);
      if (block < tile.first_block() || block > tile.last_block()) continue;
      const float* scores = tile.score(block);
      for (std::int64_t i = 0; i < tile.count(); ++i) {
        double* sum = sums + tile.head(i) * stride + block * key_block;
        const std::int64_t there = std::min(key_block, call.keys() - block * key_block);
        for (std::int64_t j = 0; j < there; ++j) {
          sum[j] += std::exp(scores[i * key_block + j] - lse[tile.flat(i)]);
        }
      }
    }
  });
}

void attention_probabilities(const full_attention_shape& shape, std::int64_t position,
                             const float* q, const float* k, const float* lse, std::int64_t stride,
                             float* out) {
  const attention_call call{shape, position, 1, q, k, nullptr};
  std::fill_n(out, shape.q_heads * stride, 0.0f);
  const std::int64_t tiles = call.tiles();
  tbb::parallel_for(std::int64_t{0}, shape.kv_heads * tiles, [&](std::int64_t task) {
    query_tile tile(call, task / tiles, task % tiles);
    for (std::int64_t block = tile.first_block(); block <= tile.last_block(); ++block) {
      const float* scores = tile.score(block);
      const std::int64_t there = std::min(key_block, call.keys() - block * key_block);
      for (std::int64_t i = 0; i < tile.count(); ++i) {
        float* row = out + tile.flat(i) * stride + block * key_block;
        for (std::int64_t j = 0; j < there; ++j) {
          row[j] = std::exp(scores[i * key_block + j] - lse[tile.flat(i)]);
        }
      }
    }
  });
}

}  // namespace kvreplay::tracer
