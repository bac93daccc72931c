// The loops of inner_loops.hpp over one instruction set's registers. Included only by the
// translation units built for one such set; `L` (a type of that unit's own) makes every
// instantiation its own, so that the linker cannot give another unit's code to the whole program.
// For the same reason nothing here instantiates a template of the standard library.
//
// L offers: reg, width; zero, set1, load, load_first (n floats, zero beyond), store, store_first;
// widen (width int8 or FP16 values), widen_first (n of them, zero beyond), widen_low and widen_high
// (the 4-bit halves of width bytes); fmadd, add, sub, mul;
// greater_or (x where x > y or y is NaN, else y); sums (lane r = sum of the lanes of p[r],
// p [width]); top (the largest lane); exp; add_to_doubles; narrow (width floats to FP16).
#pragma once

#include <cstdint>

#include "kernels/inner_loops.hpp"

namespace kvreplay::kernels::lanes {

constexpr int value_block = 32;  // rows whose products are summed before they join the output
constexpr int heads_at_once = 4;

// partial[g][at + r] = lanewise products of query row g and row at + r, summed over the channels.
//   q [heads, dim], rows [L::width] pointers, partial [heads][L::width]
template <class L, class T, int heads, int tokens>
[[gnu::always_inline]] inline void multiply_rows(const float* q, int dim, const T* const* all_rows,
                                                 int at, typename L::reg (*partial)[L::width]) {
  const T* const* rows = all_rows + at;
  typename L::reg sum[heads][tokens];
  for (int g = 0; g < heads; ++g) {
    for (int r = 0; r < tokens; ++r) sum[g][r] = L::zero();
  }
  int c = 0;
  for (; c + L::width <= dim; c += L::width) {
    typename L::reg k[tokens];
    for (int r = 0; r < tokens; ++r) k[r] = L::widen(rows[r] + c);
    for (int g = 0; g < heads; ++g) {
      const typename L::reg query = L::load(q + g * dim + c);
      for (int r = 0; r < tokens; ++r) sum[g][r] = L::fmadd(query, k[r], sum[g][r]);
    }
  }
  if (c < dim) {
    for (int r = 0; r < tokens; ++r) {
      const typename L::reg k = L::widen_first(rows[r] + c, dim - c);
      for (int g = 0; g < heads; ++g) {
        sum[g][r] = L::fmadd(L::load_first(q + g * dim + c, dim - c), k, sum[g][r]);
      }
    }
  }
  for (int g = 0; g < heads; ++g) {
    for (int r = 0; r < tokens; ++r) partial[g][at + r] = sum[g][r];
  }
}

// Scores of up to L::width rows (`count` of them real) against `heads` query rows. `scattered`:
// the rows may lie apart; a template parameter, so that others pay nothing for it.
template <class L, class T, int heads, bool scattered>
void score_block(const score_job<T>& job, int first_head, std::int64_t begin, int count) {
  constexpr int tokens = L::tokens_of[heads - 1];
  const T* rows[L::width];
  // Rows past the end repeat the last one and are not stored.
  if (!scattered || job.together(begin, count)) {
    const T* first = scattered ? job.row(begin) : job.rows + begin * job.dim;
    for (int r = 0; r < L::width; ++r) {
      rows[r] = first + std::int64_t{r < count ? r : count - 1} * job.dim;
    }
  } else {
    for (int r = 0; r < L::width; ++r) rows[r] = job.row(begin + (r < count ? r : count - 1));
  }
  typename L::reg partial[heads][L::width];
  const float* q = job.q + std::int64_t{first_head} * job.dim;
  for (int r = 0; r < L::width; r += tokens) {
    multiply_rows<L, T, heads, tokens>(q, job.dim, rows, r, partial);
  }
  const bool whole = count == L::width;
  typename L::reg scale = L::set1(1.0F);
  if (job.scale != nullptr) {
    const half_bits* from = job.scale + begin;
    scale = whole ? L::widen(from) : L::widen_first(from, count);
  }
  for (int g = 0; g < heads; ++g) {
    float* out = job.scores + (first_head + g) * job.stride + begin;
    const typename L::reg score = L::mul(L::sums(partial[g]), scale);
    if (whole) {
      L::store(out, score);
    } else {
      L::store_first(out, score, count);
    }
  }
}

// All heads against a block while its bytes are near, then the next block.
template <class L, class T, bool scattered>
void score_all(const score_job<T>& job) {
  for (std::int64_t begin = 0; begin < job.n; begin += L::width) {
    const std::int64_t left = job.n - begin;
    const int count = left < L::width ? static_cast<int>(left) : L::width;
    for (int g = 0; g < job.group; g += heads_at_once) {
      switch (job.group - g) {
        case 1:
          score_block<L, T, 1, scattered>(job, g, begin, count);
          break;
        case 2:
          score_block<L, T, 2, scattered>(job, g, begin, count);
          break;
        case 3:
          score_block<L, T, 3, scattered>(job, g, begin, count);
          break;
        default:
          score_block<L, T, heads_at_once, scattered>(job, g, begin, count);
      }
    }
  }
}

template <class L, class T>
void score_rows(const score_job<T>& job) {
  job.scattered() ? score_all<L, T, true>(job) : score_all<L, T, false>(job);
}

// o[g, c ..] += weights x rows for `slabs` registers of channels; `first` < L::width channels of
// the last register where they are not all there.
template <class L, class T, int heads, int slabs, bool whole, bool scattered>
[[gnu::always_inline]] inline void add_slab(const value_job<T>& job, int first_head,
                                            std::int64_t begin, int rows, int c, int first) {
  typename L::reg sum[heads][slabs];
  for (int g = 0; g < heads; ++g) {
    for (int j = 0; j < slabs; ++j) sum[g][j] = L::zero();
  }
  const float* weight = job.weights + first_head * job.stride + begin;
  int r = 0;
  do {  // once, where rows lie one after another
    const T* row = (scattered ? job.row(begin + r) : job.rows + begin * job.dim) + c;
    const int end =
        scattered ? r + static_cast<int>(rows_together(job.pages, begin + r, rows - r)) : rows;
    for (; r < end; ++r, row += job.dim) {
      typename L::reg p[heads];
      for (int g = 0; g < heads; ++g) p[g] = L::set1(weight[g * job.stride + r]);
      for (int j = 0; j < slabs; ++j) {
        const T* at = row + j * L::width;
        const typename L::reg v = whole ? L::widen(at) : L::widen_first(at, first);
        for (int g = 0; g < heads; ++g) sum[g][j] = L::fmadd(p[g], v, sum[g][j]);
      }
    }
  } while (scattered && r < rows);
  for (int g = 0; g < heads; ++g) {
    float* o = job.o + std::int64_t{first_head + g} * job.dim + c;
    for (int j = 0; j < slabs; ++j) {
      float* at = o + j * L::width;
      if (whole) {
        L::store(at, L::add(L::load(at), sum[g][j]));
      } else {
        L::store_first(at, L::add(L::load_first(at, first), sum[g][j]), first);
      }
    }
  }
}

template <class L, class T, int heads, bool scattered>
void add_block(const value_job<T>& job, int first_head, std::int64_t begin, int rows) {
  constexpr int slabs = L::slabs_of[heads - 1];
  int c = 0;
  for (; c + slabs * L::width <= job.dim; c += slabs * L::width) {
    add_slab<L, T, heads, slabs, true, scattered>(job, first_head, begin, rows, c, 0);
  }
  for (; c + L::width <= job.dim; c += L::width) {
    add_slab<L, T, heads, 1, true, scattered>(job, first_head, begin, rows, c, 0);
  }
  if (c < job.dim)
    add_slab<L, T, heads, 1, false, scattered>(job, first_head, begin, rows, c, job.dim - c);
}

template <class L, class T, bool scattered>
void add_all(const value_job<T>& job) {
  for (std::int64_t begin = 0; begin < job.n; begin += value_block) {
    const std::int64_t left = job.n - begin;
    const int rows = left < value_block ? static_cast<int>(left) : value_block;
    for (int g = 0; g < job.group; g += heads_at_once) {
      switch (job.group - g) {
        case 1:
          add_block<L, T, 1, scattered>(job, g, begin, rows);
          break;
        case 2:
          add_block<L, T, 2, scattered>(job, g, begin, rows);
          break;
        case 3:
          add_block<L, T, 3, scattered>(job, g, begin, rows);
          break;
        default:
          add_block<L, T, heads_at_once, scattered>(job, g, begin, rows);
      }
    }
  }
}

template <class L, class T>
void add_rows(const value_job<T>& job) {
  job.scattered() ? add_all<L, T, true>(job) : add_all<L, T, false>(job);
}

template <class L>
float row_top(const float* x, std::int64_t n, float start) {
  typename L::reg best[2] = {L::set1(start), L::set1(start)};
  std::int64_t i = 0;
  for (; i + 2 * L::width <= n; i += 2 * L::width) {
    best[0] = L::greater_or(L::load(x + i), best[0]);
    best[1] = L::greater_or(L::load(x + i + L::width), best[1]);
  }
  float top = L::top(L::greater_or(best[0], best[1]));
  for (; i < n; ++i) top = top < x[i] ? x[i] : top;
  return top;
}

template <class L>
void exponentials(float* x, std::int64_t n, float shift) {
  const typename L::reg by = L::set1(shift);
  std::int64_t i = 0;
  for (; i + L::width <= n; i += L::width) L::store(x + i, L::exp(L::sub(L::load(x + i), by)));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    L::store_first(x + i, L::exp(L::sub(L::load_first(x + i, rest), by)), rest);
  }
}

template <class L>
double row_sum(const float* x, std::int64_t n) {
  double sums[2 * L::width] = {};
  typename L::double_sums sum;
  std::int64_t i = 0;
  for (; i + L::width <= n; i += L::width) sum.add(L::load(x + i));
  if (i < n) sum.add(L::load_first(x + i, static_cast<int>(n - i)));
  sum.store(sums);
  double all = 0;
  for (const double s : sums) all += s;
  return all;
}

template <class L>
void scale_row(float* x, std::int64_t n, float factor) {
  const typename L::reg by = L::set1(factor);
  std::int64_t i = 0;
  for (; i + L::width <= n; i += L::width) L::store(x + i, L::mul(L::load(x + i), by));
  for (; i < n; ++i) x[i] *= factor;
}

template <class L>
float softmax(float* scores, std::int64_t n, const float* sink) {
  float top = row_top<L>(scores, n, -3e38F);  // finite: no (-inf) - (-inf) can arise
  if (sink != nullptr && *sink > top) top = *sink;
  exponentials<L>(scores, n, top);
  double sum = row_sum<L>(scores, n);
  if (sink != nullptr) {
    sum += __builtin_exp(static_cast<double>(*sink) - static_cast<double>(top));
  }
  scale_row<L>(scores, n, sum > 0 ? static_cast<float>(1.0 / sum) : 0.0F);
  return static_cast<float>(static_cast<double>(top) + __builtin_log(sum));
}

template <class L>
void times_halves(const float* x, const half_bits* scale, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + L::width <= n; i += L::width) {
    L::store(out + i, L::mul(L::load(x + i), L::widen(scale + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    L::store_first(out + i, L::mul(L::load_first(x + i, rest), L::widen_first(scale + i, rest)),
                   rest);
  }
}

template <class L>
void numbers8(const code_job& job) {
  for (int r = 0; r < job.count; ++r) {
    float* out = job.out + std::int64_t{r} * job.dim;
    int c = 0;
    for (; c + L::width <= job.dim; c += L::width) {
      L::store(out + c, L::mul(L::widen(job.rows[r] + c), L::load(job.scale[r] + c)));
    }
    if (c == job.dim) continue;
    const int rest = job.dim - c;
    const typename L::reg codes = L::widen_first(job.rows[r] + c, rest);
    L::store_first(out + c, L::mul(codes, L::load_first(job.scale[r] + c, rest)), rest);
  }
}

// A block of channels: low halves of 16 bytes, then high halves; the last block may be shorter.
template <class L, bool per_block>
void numbers4_row(const std::int8_t* row, const float* scale, const float* zero, int dim,
                  float* out) {
  for (int begin = 0; begin < dim; begin += channel_block, row += channel_block / 2) {
    const int block = begin / channel_block;
    const int half = dim - begin < channel_block ? (dim - begin + 1) / 2 : channel_block / 2;
    const auto put = [&](int c, typename L::reg codes) {
      const typename L::reg step = per_block ? L::set1(scale[block]) : L::load(scale + c);
      const typename L::reg from = per_block ? L::set1(zero[block]) : L::load(zero + c);
      L::store(out + c, L::fmadd(codes, step, from));
    };
    if (dim - begin >= channel_block) {
      for (int i = 0; i < half; i += L::width) {
        put(begin + i, L::widen_low(row + i));
        put(begin + half + i, L::widen_high(row + i));
      }
      continue;
    }
    for (int c = begin; c < dim; ++c) {
      const int i = c - begin;
      const int code = i < half ? row[i] & 15 : static_cast<std::uint8_t>(row[i - half]) >> 4;
      const int at = per_block ? block : c;
      out[c] = static_cast<float>(code) * scale[at] + zero[at];
    }
  }
}

template <class L>
void numbers4(const code_job& job) {
  for (int r = 0; r < job.count; ++r) {
    float* out = job.out + std::int64_t{r} * job.dim;
    if (job.per_block) {
      numbers4_row<L, true>(job.rows[r], job.scale[r], job.zero[r], job.dim, out);
    } else {
      numbers4_row<L, false>(job.rows[r], job.scale[r], job.zero[r], job.dim, out);
    }
  }
}

template <class L>
void from_halves(const half_bits* x, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + L::width <= n; i += L::width) L::store(out + i, L::widen(x + i));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    L::store_first(out + i, L::widen_first(x + i, rest), rest);
  }
}

template <class L>
void to_halves(const float* x, std::int64_t n, half_bits* out) {
  std::int64_t i = 0;
  for (; i + L::width <= n; i += L::width) L::narrow(L::load(x + i), out + i);
  if (i == n) return;
  half_bits last[L::width];
  const int rest = static_cast<int>(n - i);
  L::narrow(L::load_first(x + i, rest), last);
  for (int j = 0; j < rest; ++j) out[i + j] = last[j];
}

template <class L, int count>
void score_tile_rows(const float* q, const float* keys, int dim, float* out, std::int64_t stride) {
  constexpr int parts = 16 / L::width;
  typename L::reg sum[count][parts];
  for (int r = 0; r < count; ++r) {
    for (int p = 0; p < parts; ++p) sum[r][p] = L::zero();
  }
  for (int c = 0; c < dim; ++c) {
    typename L::reg key[parts];
    for (int p = 0; p < parts; ++p) key[p] = L::load(keys + std::int64_t{c} * 16 + p * L::width);
    for (int r = 0; r < count; ++r) {
      const typename L::reg query = L::set1(q[std::int64_t{r} * dim + c]);
      for (int p = 0; p < parts; ++p) sum[r][p] = L::fmadd(query, key[p], sum[r][p]);
    }
  }
  for (int r = 0; r < count; ++r) {
    for (int p = 0; p < parts; ++p) L::store(out + r * stride + p * L::width, sum[r][p]);
  }
}

template <class L>
void score_tile(const float* q, std::int64_t count, const float* keys, int dim, float* out,
                std::int64_t stride) {
  std::int64_t r = 0;
  for (; r + 4 <= count; r += 4) {
    score_tile_rows<L, 4>(q + r * dim, keys, dim, out + r * stride, stride);
  }
  for (; r < count; ++r) score_tile_rows<L, 1>(q + r * dim, keys, dim, out + r * stride, stride);
}

}  // namespace kvreplay::kernels::lanes
