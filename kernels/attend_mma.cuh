// attend on the tensor cores, for head_dim = value_dim = 64 or 128: a block serves up to eight
// query heads of one KV head, so that a KV byte is read once for all of them.
//
// INT8 body. Scores: the folded query as two int8 digits (query_digits.hpp), the high ones in rows
// 0-7 and the low ones in rows 8-15 of m16n8k32; keys need no conversion and scores are exact
// integers. Outputs: the bytes of two entries are spliced to halves (0x6400 + u is 1024 + u) for
// m16n8k16; weights are halves in rows 0-7 with their rounding residues in rows 8-15.
// FP16 tail. The query as two halves (value and residue), keys and values as they lie.
//
// Where a lane stands: r = lane / 4 is its query head as a row and its entry or channel column,
// c4 = lane % 4 its place in the contraction. The contraction order is free, so a lane takes 16
// contiguous bytes of a row where the fragment tables would have it gather.
//
// Weights p * b (b the value scalar of an entry) must fit a half. The reference exponent is
// therefore raised by the exponent of b: p * b < 1 always, and p alone stays below 2^15 in FP32.
#pragma once

#include "kernels/attend_device.cuh"
#include "kernels/query_digits.hpp"

namespace kvreplay::kernels::device {

inline constexpr int mma_rows = 8;  // query heads of a block
inline constexpr int mma_warps = attend_threads / simt::warp_size;
inline constexpr int tile_entries = 16;  // of a warp
inline constexpr int step_entries = tile_entries * mma_warps;

// A block's queries in shared memory; rows beyond the group are zeros.
template <int dim>
struct staged_queries {
  std::int8_t* digits;    // [16, dim]: high digits of 8 heads, then low digits
  std::uint16_t* halves;  // [16, dim]: values of 8 heads, then residues
  float* body_scale;      // [8] what an integer score is worth, log2 domain
  float* tail_scale;      // [8]
};

template <int dim>
struct mma_state {
  float out[dim / 8][4];  // C fragments: rows r (value) and r + 8 (residue), columns 2 c4 + {0, 1}
  float top, sum;         // of row r; sum over this lane's entries alone
};

struct lane_place {
  int lane, warp, r, c4;
};
SIMT_DEVICE lane_place place() {
  const int t = static_cast<int>(simt::thread_index()), lane = t % simt::warp_size;
  return {lane, t / simt::warp_size, lane / 4, lane % 4};
}

// Digits of one query row over a warp: x [dim / 32] are the channels lane + 32 j, folded.
template <int dim>
SIMT_DEVICE void stage_digits(const float (&x)[dim / 32], int row, int lane,
                              const staged_queries<dim>& q) {
  float most = 0;
  bool finite = true;
  SIMT_UNROLL
  for (int j = 0; j < dim / 32; ++j) {
    most = simt::greater_of(most, simt::abs_value(x[j]));
    finite = finite && simt::abs_value(x[j]) <= 3.4028234e38F;
  }
  most = simt::warp_max(most);
  const bool sound = simt::ballot(finite) == 0xffffffffu;
  const float scale = digit_scale(sound ? most : simt::bits_float(0x7fc00000u));
  SIMT_UNROLL
  for (int j = 0; j < dim / 32; ++j) {
    const std::int32_t value = digit_value(x[j], scale);
    q.digits[row * dim + lane + 32 * j] = static_cast<std::int8_t>(high_digit(value));
    q.digits[(row + mma_rows) * dim + lane + 32 * j] = static_cast<std::int8_t>(low_digit(value));
  }
  if (lane == 0) q.body_scale[row] = scale * log2_e;
}

// The row as halves and residues after a power of two has brought it to [256, 512).
template <int dim>
SIMT_DEVICE void stage_halves(const float (&x)[dim / 32], int row, int lane,
                              const staged_queries<dim>& q) {
  float most = 0;
  bool finite = true;
  SIMT_UNROLL
  for (int j = 0; j < dim / 32; ++j) {
    most = simt::greater_of(most, simt::abs_value(x[j]));
    finite = finite && simt::abs_value(x[j]) <= 0x1p100F;
  }
  most = simt::warp_max(most);
  const bool sound = simt::ballot(finite) == 0xffffffffu;
  const std::uint32_t exponent = simt::float_bits(most) & 0x7f800000u;
  const bool zero = most < 0x1p-100F;
  const float inverse = zero ? 0.0F : simt::bits_float((254u << 23) - exponent) * 256.0F;
  SIMT_UNROLL
  for (int j = 0; j < dim / 32; ++j) {
    const float scaled = sound ? x[j] * inverse : 0.0F;
    const std::uint16_t value = simt::float_to_half(scaled);
    q.halves[row * dim + lane + 32 * j] = value;
    q.halves[(row + mma_rows) * dim + lane + 32 * j] =
        simt::float_to_half(scaled - simt::half_to_float(value));
  }
  if (lane == 0) {
    const float scale = zero ? 0.0F : simt::bits_float(exponent) * (log2_e / 256.0F);
    q.tail_scale[row] = sound ? scale : simt::bits_float(0x7fc00000u);
  }
}

// q times the softmax scale, and times the channel scales for the body: a warp per row.
template <int dim>
SIMT_DEVICE void stage_queries(const attend_batch& a, const attend_head& target, int first_row,
                               int rows, const staged_queries<dim>& q) {
  const lane_place at = place();
  const float* channel_scale = target.storage->k_channel_scale;
  for (int row = at.warp; row < mma_rows; row += mma_warps) {
    float plain[dim / 32], folded[dim / 32];
    SIMT_UNROLL
    for (int j = 0; j < dim / 32; ++j) {
      const int c = at.lane + 32 * j;
      plain[j] = row < rows ? simt::multiply(target.q[(first_row + row) * dim + c], a.softmax_scale)
                            : 0.0F;
      folded[j] = channel_scale == nullptr ? plain[j] : simt::multiply(plain[j], channel_scale[c]);
    }
    stage_digits<dim>(folded, row, at.lane, q);
    stage_halves<dim>(plain, row, at.lane, q);
  }
  simt::sync_threads();
}

// Raises the row's reference to `most` where any row of the warp needs it.
template <int dim>
SIMT_DEVICE void raise_reference(float most, mma_state<dim>& s) {
  most = simt::greater_of(most, simt::shuffle_xor(most, 1));
  most = simt::greater_of(most, simt::shuffle_xor(most, 2));
  if (simt::ballot(most > s.top) == 0) return;
  const float top = simt::greater_of(s.top, most), shrink = simt::exp2_fast(s.top - top);
  s.top = top;
  s.sum *= shrink;
  SIMT_UNROLL
  for (int j = 0; j < dim / 8; ++j) {
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) s.out[j][i] *= shrink;
  }
}

// Weights of four entries (2 c4 + {0, 1} and those + 8) as the A operand.
SIMT_DEVICE void pack_weights(const float (&w)[4], std::uint32_t (&packed)[4]) {
  SIMT_UNROLL
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t value = simt::pack_halves(w[2 * i], w[2 * i + 1]);
    packed[2 * i] = value;
    packed[2 * i + 1] =
        simt::pack_halves(w[2 * i] - simt::low_half(value), w[2 * i + 1] - simt::high_half(value));
  }
}

// The entry that fragment element i (0..3) of a lane stands for, from the tile's first.
SIMT_DEVICE int tile_entry(int c4, int i) { return c4 * 2 + (i & 1) + (i >> 1) * 8; }

// Loads `bytes` (8, 16 or 32) into words.
template <int words>
SIMT_DEVICE void load_words(const void* p, std::uint32_t (&out)[words]) {
  if constexpr (words == 2) {
    const simt::words2 v = simt::load8(p);
    out[0] = v.word[0];
    out[1] = v.word[1];
  } else {
    SIMT_UNROLL
    for (int i = 0; i < words / 4; ++i) {
      const simt::words4 v = simt::load16(static_cast<const char*>(p) + 16 * i);
      SIMT_UNROLL
      for (int j = 0; j < 4; ++j) out[4 * i + j] = v.word[j];
    }
  }
}

// out += weights x values for 16 entries of INT8 rows. A lane holds dim / 8 contiguous channels of
// its four entries.
template <int dim>
SIMT_DEVICE void add_codes(const std::uint32_t (&packed)[4], const std::uint32_t (&v)[4][dim / 32],
                           mma_state<dim>& s) {
  SIMT_UNROLL
  for (int w = 0; w < dim / 32; ++w) {
    std::uint32_t u[4];
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) u[i] = v[i][w] ^ 0x80808080u;  // code + 128
    // Bytes of two neighbouring entries side by side, channels 0, 1 and 2, 3.
    const std::uint32_t near01 = simt::permute_bytes(u[0], u[1], 0x5140);
    const std::uint32_t near23 = simt::permute_bytes(u[0], u[1], 0x7362);
    const std::uint32_t far01 = simt::permute_bytes(u[2], u[3], 0x5140);
    const std::uint32_t far23 = simt::permute_bytes(u[2], u[3], 0x7362);
    SIMT_UNROLL
    for (int c = 0; c < 4; ++c) {
      const std::uint32_t selector = (c & 1) != 0 ? 0x4342u : 0x4140u;
      const std::uint32_t b[2] = {
          simt::subtract_halves(simt::permute_bytes(c < 2 ? near01 : near23, 0x64646464u, selector),
                                0x64806480u),
          simt::subtract_halves(simt::permute_bytes(c < 2 ? far01 : far23, 0x64646464u, selector),
                                0x64806480u)};
      simt::mma_f16(s.out[w * 4 + c], packed, b);
    }
  }
}

template <int dim>
SIMT_DEVICE void add_halves(const std::uint32_t (&packed)[4], const std::uint32_t (&v)[4][dim / 16],
                            mma_state<dim>& s) {
  SIMT_UNROLL
  for (int w = 0; w < dim / 16; ++w) {
    SIMT_UNROLL
    for (int c = 0; c < 2; ++c) {
      const std::uint32_t selector = c == 0 ? 0x5410u : 0x7632u;
      const std::uint32_t b[2] = {simt::permute_bytes(v[0][w], v[1][w], selector),
                                  simt::permute_bytes(v[2][w], v[3][w], selector)};
      simt::mma_f16(s.out[w * 2 + c], packed, b);
    }
  }
}

// Scores of 16 entries of the body against the block's heads, times each entry's scalar.
template <int dim>
SIMT_DEVICE void body_scores(const std::uint32_t (&query)[dim / 32][4],
                             const simt::words4 (&k)[2][dim / 64], float scale,
                             const std::uint32_t (&k_scale)[2], float (&score)[4]) {
  SIMT_UNROLL
  for (int half = 0; half < 2; ++half) {
    int d[4] = {0, 0, 0, 0};
    SIMT_UNROLL
    for (int i = 0; i < dim / 64; ++i) {
      const std::uint32_t b0[2] = {k[half][i].word[0], k[half][i].word[1]};
      const std::uint32_t b1[2] = {k[half][i].word[2], k[half][i].word[3]};
      simt::mma_s8(d, query[2 * i], b0);
      simt::mma_s8(d, query[2 * i + 1], b1);
    }
    const float x0 = static_cast<float>(digit_base * d[0] + d[2]) * scale;
    const float x1 = static_cast<float>(digit_base * d[1] + d[3]) * scale;
    score[2 * half] = x0 * simt::low_half(k_scale[half]);
    score[2 * half + 1] = x1 * simt::high_half(k_scale[half]);
  }
}

// Two neighbouring scalars from an even entry on.
SIMT_DEVICE std::uint32_t scalar_pair(const std::uint16_t* scale, int entry) {
  return simt::load4(scale + entry);
}

// e with 2^e > the half's value, as a float: exact for the normal values that scalars are.
SIMT_DEVICE float exponent_above(std::uint32_t half) {
  return static_cast<float>(static_cast<int>(half >> 10 & 31u) - 14);
}

// What a tile's four scores of a lane become: stored, masked beyond `end`, exponentials.
//   lift[i] is added to score i for the reference exponent; worth[i] multiplies its weight
template <int dim>
SIMT_DEVICE void weigh(float (&score)[4], const float (&lift)[4], const float (&worth)[4], int t0,
                       int end, int c4, float* row_scores, std::uint32_t (&packed)[4],
                       mma_state<dim>& s) {
  bool inside[4];
  float most = lowest, weight[4];
  SIMT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int t = t0 + tile_entry(c4, i);
    inside[i] = t < end;
    if (inside[i] && row_scores != nullptr) row_scores[t] = score[i];
    most = simt::greater_of(most, inside[i] ? score[i] + lift[i] : lowest);
  }
  raise_reference<dim>(most, s);
  SIMT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float p = inside[i] ? simt::exp2_fast(score[i] - s.top) : 0.0F;
    s.sum += p;
    weight[i] = inside[i] ? p * worth[i] : 0.0F;
  }
  pack_weights(weight, packed);
}

template <int dim>
SIMT_DEVICE void absorb_body_tiles(const attend_batch& a, const head_storage& h, float* row_scores,
                                   const staged_queries<dim>& q, mma_state<dim>& s) {
  constexpr int pieces = dim / 64, channels = dim / 8;
  const lane_place at = place();
  const entry_range part = split_range(a, h.body, static_cast<int>(simt::block_x()), step_entries);
  if (part.begin >= part.end) return;
  std::uint32_t query[dim / 32][4];
  SIMT_UNROLL
  for (int step = 0; step < dim / 32; ++step) {
    const int channel = step / 2 * 64 + at.c4 * 16 + step % 2 * 8;
    SIMT_UNROLL
    for (int j = 0; j < 4; ++j) {
      query[step][j] = *reinterpret_cast<const std::uint32_t*>(
          q.digits + (at.r + (j & 1) * mma_rows) * dim + channel + (j >> 1) * 4);
    }
  }
  const float scale = q.body_scale[at.r];
  // In registers: for all the compiler knows, the stores of scores could change them in memory.
  const std::int8_t *const keys = h.body_k, *const values = h.body_v;
  const std::uint16_t *const key_scales = h.body_k_scale, *const value_scales = h.body_v_scale;
  for (int t0 = part.begin + at.warp * tile_entries; t0 < part.end; t0 += step_entries) {
    simt::words4 k[2][pieces];
    std::uint32_t v[4][dim / 32], k_scale[2], v_scale[2], packed[4];
    SIMT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int t = simt::lesser_of(t0 + half * 8 + at.r, part.end - 1);
      SIMT_UNROLL
      for (int i = 0; i < pieces; ++i) {
        k[half][i] = simt::load16(keys + std::int64_t{t} * dim + at.c4 * 16 + i * 64);
      }
      k_scale[half] = scalar_pair(key_scales, t0 + half * 8 + at.c4 * 2);
      v_scale[half] = scalar_pair(value_scales, t0 + half * 8 + at.c4 * 2);
    }
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int t = simt::lesser_of(t0 + tile_entry(at.c4, i), part.end - 1);
      load_words(values + std::int64_t{t} * dim + at.r * channels, v[i]);
    }
    float score[4];
    body_scores<dim>(query, k, scale, k_scale, score);
    const float lift[4] = {exponent_above(v_scale[0]), exponent_above(v_scale[0] >> 16),
                           exponent_above(v_scale[1]), exponent_above(v_scale[1] >> 16)};
    const float worth[4] = {simt::low_half(v_scale[0]), simt::high_half(v_scale[0]),
                            simt::low_half(v_scale[1]), simt::high_half(v_scale[1])};
    weigh<dim>(score, lift, worth, t0, part.end, at.c4, row_scores, packed, s);
    add_codes<dim>(packed, v, s);
  }
  if (h.v_channel_scale == nullptr) return;
  SIMT_UNROLL
  for (int j = 0; j < dim / 8; ++j) {
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) {
      s.out[j][i] *= h.v_channel_scale[(at.c4 * 2 + (i & 1)) * channels + j];
    }
  }
}

// Scores of 16 entries of the tail.
template <int dim>
SIMT_DEVICE void tail_scores(const std::uint32_t (&query)[dim / 16][4], const std::uint16_t* keys,
                             int t0, int last, float scale, float (&score)[4]) {
  const lane_place at = place();
  SIMT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int t = simt::lesser_of(t0 + half * 8 + at.r, last);
    float d[4] = {0, 0, 0, 0};
    SIMT_UNROLL
    for (int i = 0; i < dim / 32; ++i) {
      const simt::words4 k = simt::load16(keys + std::int64_t{t} * dim + at.c4 * 8 + i * 32);
      const std::uint32_t b0[2] = {k.word[0], k.word[1]}, b1[2] = {k.word[2], k.word[3]};
      simt::mma_f16(d, query[2 * i], b0);
      simt::mma_f16(d, query[2 * i + 1], b1);
    }
    score[2 * half] = (d[0] + d[2]) * scale;
    score[2 * half + 1] = (d[1] + d[3]) * scale;
  }
}

template <int dim>
SIMT_DEVICE void absorb_tail_tiles(const attend_batch& a, const head_storage& h, float* row_scores,
                                   const staged_queries<dim>& q, mma_state<dim>& s) {
  constexpr int channels = dim / 8;
  const lane_place at = place();
  const entry_range part = split_range(a, h.tail, static_cast<int>(simt::block_x()), step_entries);
  if (part.begin >= part.end) return;
  std::uint32_t query[dim / 16][4];
  SIMT_UNROLL
  for (int step = 0; step < dim / 16; ++step) {
    const int channel = step / 2 * 32 + at.c4 * 8 + step % 2 * 4;
    SIMT_UNROLL
    for (int j = 0; j < 4; ++j) {
      query[step][j] = *reinterpret_cast<const std::uint32_t*>(
          q.halves + (at.r + (j & 1) * mma_rows) * dim + channel + (j >> 1) * 2);
    }
  }
  const float scale = q.tail_scale[at.r];
  const float lift[4] = {0, 0, 0, 0}, worth[4] = {1, 1, 1, 1};
  float* scores = row_scores == nullptr ? nullptr : row_scores + h.body;
  for (int t0 = part.begin + at.warp * tile_entries; t0 < part.end; t0 += step_entries) {
    std::uint32_t v[4][dim / 16], packed[4];
    float score[4];
    tail_scores<dim>(query, h.tail_k, t0, part.end - 1, scale, score);
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int t = simt::lesser_of(t0 + tile_entry(at.c4, i), part.end - 1);
      load_words(h.tail_v + std::int64_t{t} * dim + at.r * channels, v[i]);
    }
    weigh<dim>(score, lift, worth, t0, part.end, at.c4, scores, packed, s);
    add_halves<dim>(packed, v, s);
  }
}

// grid (splits, heads, ceil(group / 8)), block 128
template <int dim>
SIMT_KERNEL SIMT_BOUNDS(attend_threads, 3) attend_mma_kernel(attend_batch a) {
  SIMT_SHARED(std::int8_t, digits, 2 * mma_rows * dim);
  SIMT_SHARED(std::uint16_t, halves, 2 * mma_rows * dim);
  SIMT_SHARED(float, scales, 2 * mma_rows);
  SIMT_SHARED(float, shared, mma_warps* mma_rows*(dim + 2));
  const attend_head& target = a.heads[simt::block_y()];
  const head_storage& h = *target.storage;
  const lane_place at = place();
  const int first_row = static_cast<int>(simt::block_z()) * mma_rows;
  const int rows = simt::lesser_of(mma_rows, a.group - first_row);
  const staged_queries<dim> q = {digits, halves, scales, scales + mma_rows};
  stage_queries<dim>(a, target, first_row, rows, q);
  mma_state<dim> s;
  s.top = lowest;
  s.sum = 0;
  SIMT_UNROLL
  for (int j = 0; j < dim / 8; ++j) {
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) s.out[j][i] = 0;
  }
  float* row_scores =
      at.r < rows ? score_row(a, static_cast<int>(simt::block_y()), first_row + at.r) : nullptr;
  absorb_body_tiles<dim>(a, h, row_scores, q, s);
  absorb_tail_tiles<dim>(a, h, row_scores, q, s);
  s.sum += simt::shuffle_xor(s.sum, 1);
  s.sum += simt::shuffle_xor(s.sum, 2);
  float* mine = shared + (at.warp * mma_rows + at.r) * (dim + 2);
  SIMT_UNROLL
  for (int j = 0; j < dim / 8; ++j) {
    SIMT_UNROLL
    for (int i = 0; i < 2; ++i)
      mine[(at.c4 * 2 + i) * (dim / 8) + j] = s.out[j][i] + s.out[j][i + 2];
  }
  if (at.c4 == 0) {
    mine[dim] = s.top;
    mine[dim + 1] = s.sum;
  }
  simt::sync_threads();
  write_partial(a, shared, mma_warps, mma_rows, rows, first_row);
}

}  // namespace kvreplay::kernels::device
