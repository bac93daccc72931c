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

// Every product has this one shape, whatever a call asks for: 16 query rows of one KV head
// (blas.hpp) by 128 keys whose block begins at a multiple of 128 positions. So a row's sums run in
// one order. Tiles are laid out with their 16 rows innermost.
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
  std::int64_t tiles() const { return (rows * group() + lanes - 1) / lanes; }
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
        begin_(tile * lanes),
        count_(std::min<std::int64_t>(lanes, call.rows * call.group() - begin_)),
        q_(index(call.shape.head_dim * lanes), 0.0f),
        padded_(index(key_block * std::max(call.shape.head_dim, call.shape.value_dim))),
        scores_(index(key_block * lanes)) {
    const std::int64_t dim = call.shape.head_dim;
    for (std::int64_t i = 0; i < count_; ++i) {
      for (std::int64_t c = 0; c < dim; ++c) q_[index(c * lanes + i)] = call.q[flat(i) * dim + c];
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

  // Scaled scores [128, 16] of the block, -inf where a row cannot see a key.
  float* score(std::int64_t block) {
    const std::int64_t dim = call_.shape.head_dim;
    const auto [keys, stride] = block_of(call_.k, dim, block);
    multiply_lanes(key_block, static_cast<int>(dim), keys, stride, q_.data(), scores_.data());
    const auto scale = static_cast<float>(call_.shape.softmax_scale);
    for (float& score : scores_) score *= scale;
    for (std::int64_t i = 0; i < lanes; ++i) hide(i, block * key_block);
    return scores_.data();
  }

  // out [value_dim, 16] = values of the block^T * weights [128, 16].
  void weigh(std::int64_t block, const float* weights, float* out) {
    const std::int64_t dim = call_.shape.value_dim;
    const auto [values, stride] = block_of(call_.v, dim, block);
    multiply_lanes_transposed(static_cast<int>(dim), key_block, values, stride, weights, out);
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

  // A lane without a row sees nothing.
  void hide(std::int64_t i, std::int64_t first_key) {
    const std::int64_t low = i < count_ ? call_.first_visible(position(i)) - first_key : key_block;
    const std::int64_t high = i < count_ ? position(i) - first_key : -1;  // the last one visible
    for (std::int64_t j = 0; j < std::min(low, key_block); ++j) {
      scores_[index(j * lanes + i)] = minus_infinity;
    }
    for (std::int64_t j = std::max<std::int64_t>(0, high + 1); j < key_block; ++j) {
      scores_[index(j * lanes + i)] = minus_infinity;
    }
  }

  const attention_call& call_;
  std::int64_t kv_head_, begin_, count_;
  std::vector<float> q_, padded_, scores_;
};

// Running softmax of a tile: maximum, sum and weighted values per row.
struct softmax_state {
  float maximum[lanes];
  double sum[lanes] = {};
  std::vector<float> o;  // [value_dim, 16]

  explicit softmax_state(std::int64_t value_dim) : o(index(value_dim * lanes), 0.0f) {
    std::fill_n(maximum, lanes, minus_infinity);
  }
};

// Turns scores [128, 16] into weights relative to the new maxima and rescales what there was. A
// block that a row cannot see changes nothing of it.
void absorb_scores(softmax_state& state, float* scores) {
  float maximum[lanes], rescale[lanes];
  std::copy_n(state.maximum, lanes, maximum);
  for (std::int64_t j = 0; j < key_block; ++j) {
    for (int i = 0; i < lanes; ++i) maximum[i] = std::max(maximum[i], scores[j * lanes + i]);
  }
  for (int i = 0; i < lanes; ++i) {
    if (maximum[i] == minus_infinity) maximum[i] = 0;  // so that no difference of infinities arises
    rescale[i] = std::exp(state.maximum[i] - maximum[i]);
    state.sum[i] *= rescale[i];
  }
  for (std::int64_t j = 0; j < key_block; ++j) {
    for (int i = 0; i < lanes; ++i) {
      float& score = scores[j * lanes + i];
      score = score == minus_infinity ? 0.0f : std::exp(score - maximum[i]);
      state.sum[i] += score;
    }
  }
  for (int i = 0; i < lanes; ++i) {
    // A row that has seen nothing yet keeps its -inf.
    if (state.sum[i] > 0) state.maximum[i] = maximum[i];
  }
  for (size_t c = 0; c < state.o.size(); ++c) state.o[c] *= rescale[c % lanes];
}

void attend_tile(const attention_call& call, std::int64_t kv_head, std::int64_t tile_index,
                 float* o, float* lse) {
  query_tile tile(call, kv_head, tile_index);
  const std::int64_t dim = call.shape.value_dim;
  softmax_state state(dim);
  std::vector<float> part(state.o.size());
  for (std::int64_t block = tile.first_block(); block <= tile.last_block(); ++block) {
    float* scores = tile.score(block);
    absorb_scores(state, scores);
    tile.weigh(block, scores, part.data());
    for (size_t c = 0; c < part.size(); ++c) state.o[c] += part[c];
  }
  for (std::int64_t i = 0; i < tile.count(); ++i) {
    for (std::int64_t c = 0; c < dim; ++c) {
      o[tile.flat(i) * dim + c] = static_cast<float>(state.o[index(c * lanes + i)] / state.sum[i]);
    }
    lse[tile.flat(i)] = static_cast<float>(state.maximum[i] + std::log(state.sum[i]));
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
          sum[j] += std::exp(scores[j * lanes + i] - lse[tile.flat(i)]);
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
          row[j] = std::exp(scores[j * lanes + i] - lse[tile.flat(i)]);
        }
      }
    }
  });
}

}  // namespace kvreplay::tracer
