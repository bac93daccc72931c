// The loops for any machine: fixed lanes that the compiler vectorises with what it is given.
#include <algorithm>
#include <cstring>

#include "kernels/half.hpp"
#include "kernels/inner_loops.hpp"
#include "kernels/numerics.hpp"

namespace kvreplay::kernels {
namespace {

constexpr int block_rows = 32;  // rows converted to float at once, shared by the heads of a group
constexpr int most_channels = 256;
constexpr int tile = 16;  // keys of score_tile

inline float to_float(half_bits x) { return half_to_float(x); }
inline float to_float(std::int8_t x) { return static_cast<float>(x); }

// `count` values as floats, in `buffer` where they are stored narrower.
template <class T>
const float* as_floats(const T* values, std::int64_t count, float* buffer) {
  for (std::int64_t i = 0; i < count; ++i) buffer[i] = to_float(values[i]);
  return buffer;
}
const float* as_floats(const float* values, std::int64_t, float*) { return values; }

// `count` rows of a job from `begin` on as floats, one after another.
template <class Job>
const float* rows_as_floats(const Job& job, std::int64_t begin, std::int64_t count, float* buffer) {
  if (job.together(begin, count)) return as_floats(job.row(begin), count * job.dim, buffer);
  for (std::int64_t i = 0; i < count; ++i) {
    float* to = buffer + i * job.dim;
    const float* from = as_floats(job.row(begin + i), job.dim, to);
    if (from != to) std::copy_n(from, job.dim, to);
  }
  return buffer;
}

template <class T>
void score_rows(const score_job<T>& job) {
  alignas(64) float buffer[block_rows * most_channels];
  const int dim = job.dim;
  for (std::int64_t begin = 0; begin < job.n; begin += block_rows) {
    const std::int64_t rows = std::min<std::int64_t>(block_rows, job.n - begin);
    const float* block = rows_as_floats(job, begin, rows, buffer);
    for (int g = 0; g < job.group; ++g) {
      float* out = job.scores + g * job.stride + begin;
      const float* query = job.q + std::int64_t{g} * dim;
      std::int64_t i = 0;
      for (; i + 4 <= rows; i += 4) dot_rows<4>(query, block + i * dim, dim, out + i);
      for (; i < rows; ++i) dot_rows<1>(query, block + i * dim, dim, out + i);
      if (job.scale == nullptr) continue;
      for (i = 0; i < rows; ++i) out[i] *= half_to_float(job.scale[begin + i]);
    }
  }
}

// o [dim] += sum over rows of weight[i] * block[i]
void add_block(const float* weight, const float* block, std::int64_t rows, int dim, float* o) {
  std::int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {  // four rows for each load and store of the output
    const float* r0 = block + i * dim;
    const float *r1 = r0 + dim, *r2 = r1 + dim, *r3 = r2 + dim;
    const float w0 = weight[i], w1 = weight[i + 1], w2 = weight[i + 2], w3 = weight[i + 3];
    for (int c = 0; c < dim; ++c) o[c] += (w0 * r0[c] + w1 * r1[c]) + (w2 * r2[c] + w3 * r3[c]);
  }
  for (; i < rows; ++i) {
    const float* r = block + i * dim;
    for (int c = 0; c < dim; ++c) o[c] += weight[i] * r[c];
  }
}

template <class T>
void add_rows(const value_job<T>& job) {
  alignas(64) float buffer[block_rows * most_channels];
  const int dim = job.dim;
  for (std::int64_t begin = 0; begin < job.n; begin += block_rows) {
    const std::int64_t rows = std::min<std::int64_t>(block_rows, job.n - begin);
    const float* block = rows_as_floats(job, begin, rows, buffer);
    for (int g = 0; g < job.group; ++g) {
      add_block(job.weights + g * job.stride + begin, block, rows, dim,
                job.o + std::int64_t{g} * dim);
    }
  }
}

void digit_scores(const digit_row& query, int dim, const std::int8_t* codes, std::int64_t n,
                  std::int32_t* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = digit_score(query, codes + i * dim, dim);
}

void times_halves(const float* x, const half_bits* scale, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] * half_to_float(scale[i]);
}

void numbers8(const code_job& job) {
  for (int r = 0; r < job.count; ++r) {
    float* out = job.out + std::int64_t{r} * job.dim;
    for (int c = 0; c < job.dim; ++c) {
      out[c] = static_cast<float>(job.rows[r][c]) * job.scale[r][c];
    }
  }
}

void numbers4(const code_job& job) {
  for (int r = 0; r < job.count; ++r) {
    const std::int8_t* row = job.rows[r];
    float* out = job.out + std::int64_t{r} * job.dim;
    for (int begin = 0; begin < job.dim; begin += channel_block, row += channel_block / 2) {
      const int channels = std::min(channel_block, job.dim - begin), half = (channels + 1) / 2;
      for (int i = 0; i < half; ++i) out[begin + i] = static_cast<float>(row[i] & 15);
      for (int i = half; i < channels; ++i) {
        out[begin + i] = static_cast<float>(static_cast<std::uint8_t>(row[i - half]) >> 4);
      }
      for (int c = begin; c < begin + channels; ++c) {
        const int at = job.per_block ? begin / channel_block : c;
        out[c] = out[c] * job.scale[r][at] + job.zero[r][at];
      }
    }
  }
}

void from_halves(const half_bits* x, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = half_to_float(x[i]);
}

void to_halves(const float* x, std::int64_t n, half_bits* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = float_to_half(x[i]);
}

template <int count>
void score_tile_rows(const float* q, const float* keys, int dim, float* out, std::int64_t stride) {
  constexpr int parts = tile / 4;
  float4 sum[count][parts] = {};
  for (int c = 0; c < dim; ++c) {
    for (int p = 0; p < parts; ++p) {
      const float4 key = load4(keys + std::int64_t{c} * tile + 4 * p);
      for (int r = 0; r < count; ++r) sum[r][p] += q[std::int64_t{r} * dim + c] * key;
    }
  }
  for (int r = 0; r < count; ++r) std::memcpy(out + r * stride, sum[r], sizeof sum[r]);
}

void score_tile(const float* q, std::int64_t count, const float* keys, int dim, float* out,
                std::int64_t stride) {
  std::int64_t r = 0;
  for (; r + 2 <= count; r += 2) {
    score_tile_rows<2>(q + r * dim, keys, dim, out + r * stride, stride);
  }
  for (; r < count; ++r) score_tile_rows<1>(q + r * dim, keys, dim, out + r * stride, stride);
}

}  // namespace

const inner_loops plain_loops = {
    .score_int8 = score_rows<std::int8_t>,
    .score_half = score_rows<half_bits>,
    .score_float = score_rows<float>,
    .add_int8 = add_rows<std::int8_t>,
    .add_half = add_rows<half_bits>,
    .add_float = add_rows<float>,
    .digit_scores = digit_scores,
    .softmax = softmax_row,
    .exponentials = exp_in_place,
    .times_halves = times_halves,
    .numbers8 = numbers8,
    .numbers4 = numbers4,
    .from_halves = from_halves,
    .to_halves = to_halves,
    .score_tile = score_tile,
};

}  // namespace kvreplay::kernels
