// The loops in which the host kernels spend their time, one table of functions per instruction set.
// Only plain types here: the translation units built for one instruction set include this header
// and must not instantiate anything that the linker could take for the whole program.
#pragma once

#include <cstdint>

#include "kernels/query_digits.hpp"
#include "kernels/row_pages.hpp"

namespace kvreplay::kernels {

using half_bits = std::uint16_t;  // as in half.hpp

// scores[g * stride + i] = (row g of q) . (row i of rows), times scale[i] where `scale` is given.
// Row i lies where `pages` says, and has the same bits wherever that is.
//   q [group, dim]; rows [n, dim]; scale [n] or null; dim 1 .. 256
// With `index` [n], row i starts at rows + index[i] * row_stride instead.
template <class T>
struct score_job {
  const float* q;
  int group, dim;
  const T* rows;
  const half_bits* scale;
  std::int64_t n;
  float* scores;
  std::int64_t stride;
  row_pages pages = {};
  const std::int32_t* index = nullptr;
  std::int64_t row_stride = 0;

  bool scattered() const { return index != nullptr || pages.table != nullptr; }
  // Whether rows i .. i + count - 1 lie one after another.
  bool together(std::int64_t i, std::int64_t count) const {
    return index == nullptr && rows_together(pages, i, count) == count;
  }
  const T* row(std::int64_t i) const {
    return index == nullptr ? rows + row_of(pages, i) * dim : rows + index[i] * row_stride;
  }
};

// o[g, c] += sum over i of weights[g * stride + i] * rows[i, c].
//   rows [n, dim]; o [group, dim]
template <class T>
struct value_job {
  const float* weights;
  std::int64_t stride;
  int group, dim;
  const T* rows;
  std::int64_t n;
  float* o;
  row_pages pages = {};

  bool scattered() const { return pages.table != nullptr; }
  bool together(std::int64_t i, std::int64_t count) const {
    return rows_together(pages, i, count) == count;
  }
  const T* row(std::int64_t i) const { return rows + row_of(pages, i) * dim; }
};

inline constexpr int channel_block = 32;

// out[r, c] = code[r, c] * scale + zero, for rows of codes one to a byte (numbers8) or two
// (numbers4: groups.hpp has the order). Row r's scales and zero points stand at scale[r] and
// zero[r]: one per channel, or one per 32 channels.   out [count, dim]
struct code_job {
  const std::int8_t* const* rows;
  const float* const* scale;
  const float* const* zero;  // numbers8: not read, zeros
  int count, dim;
  bool per_block;  // numbers4 alone
  float* out;
};

struct inner_loops {
  void (*score_int8)(const score_job<std::int8_t>&);
  void (*score_half)(const score_job<half_bits>&);
  void (*score_float)(const score_job<float>&);
  void (*add_int8)(const value_job<std::int8_t>&);
  void (*add_half)(const value_job<half_bits>&);
  void (*add_float)(const value_job<float>&);
  // out[i] = K row i . digits, exactly; codes [n, dim].
  void (*digit_scores)(const digit_row& query, int dim, const std::int8_t* codes, std::int64_t n,
                       std::int32_t* out);
  // As softmax_row and exp_in_place in numerics.hpp.
  float (*softmax)(float* scores, std::int64_t n, const float* sink);
  void (*exponentials)(float* x, std::int64_t n, float shift);
  // out[i] = x[i] * scale[i]
  void (*times_halves)(const float* x, const half_bits* scale, std::int64_t n, float* out);
  void (*numbers8)(const code_job&);
  void (*numbers4)(const code_job&);
  void (*from_halves)(const half_bits* x, std::int64_t n, float* out);
  void (*to_halves)(const float* x, std::int64_t n, half_bits* out);
  // out[r * stride + j] = (row r of q) . (key j): q [count, dim], keys [dim, 16]. Every product sum
  // goes channel by channel, so that its bits do not depend on `count`.
  void (*score_tile)(const float* q, std::int64_t count, const float* keys, int dim, float* out,
                     std::int64_t stride);
};

extern const inner_loops plain_loops;
#if defined(__x86_64__)
extern const inner_loops avx2_loops;    // runs only where isa_supported(isa::avx2)
extern const inner_loops avx512_loops;  // likewise
#endif

// The table of active_isa(). Results of one table do not depend on threads or on what else is
// computed; tables agree within the tolerances of the tests, not bit for bit.
const inner_loops& active_loops();

}  // namespace kvreplay::kernels
