// The loops over AVX-512 registers of sixteen floats; INT8 scores by VNNI. Built with those
// instructions enabled for this file alone: see lane_loops.hpp for what that forbids.
#include <immintrin.h>

#include "kernels/lane_loops.hpp"

namespace kvreplay::kernels {
namespace {

struct avx512_lanes {
  using reg = __m512;
  static constexpr int width = 16;
  // For 1 .. 4 heads: rows, and registers of channels, worked on at once: at least 8 sums to hide
  // the latency of FMA, in 32 registers.
  static constexpr int tokens_of[] = {8, 8, 4, 4};
  static constexpr int slabs_of[] = {8, 4, 4, 4};

  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static reg zero() { return _mm512_setzero_ps(); }
  static reg set1(float x) { return _mm512_set1_ps(x); }
  static reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, reg x) { _mm512_storeu_ps(p, x); }
  static reg load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_first(float* p, reg x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }

  static reg widen(const float* p) { return load(p); }
  static reg widen(const half_bits* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static reg widen(const std::int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  static reg widen_low(const std::int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return widen_codes(_mm_and_si128(bytes, _mm_set1_epi8(15)));
  }
  static reg widen_high(const std::int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return widen_codes(_mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15)));
  }
  static reg widen_codes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
  static reg widen_first(const float* p, int n) { return load_first(p, n); }
  static reg widen_first(const half_bits* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static reg widen_first(const std::int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
  }
  static void narrow(reg x, half_bits* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static reg fmadd(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  // The instruction returns its second operand where either is NaN.
  static reg greater_or(reg x, reg y) { return _mm512_max_ps(x, y); }

  // Four levels of interleave and add; after the second, every register holds four sums in each of
  // its 128-bit quarters.
  static reg sums(const reg* p) {
    reg b[8], c[4];
    for (int i = 0; i < 8; ++i) {
      b[i] = add(_mm512_unpacklo_ps(p[2 * i], p[2 * i + 1]),
                 _mm512_unpackhi_ps(p[2 * i], p[2 * i + 1]));
    }
    for (int i = 0; i < 4; ++i) {
      c[i] = add(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44),
                 _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xee));
    }
    const reg d0 =
        add(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
    const reg d1 =
        add(_mm512_shuffle_f32x4(c[2], c[3], 0x88), _mm512_shuffle_f32x4(c[2], c[3], 0xdd));
    return add(_mm512_shuffle_f32x4(d0, d1, 0x88), _mm512_shuffle_f32x4(d0, d1, 0xdd));
  }
  static __m512i integer_sums(const __m512i* p) {
    __m512i b[8], c[4];
    for (int i = 0; i < 8; ++i) {
      b[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(p[2 * i], p[2 * i + 1]),
                              _mm512_unpackhi_epi32(p[2 * i], p[2 * i + 1]));
    }
    for (int i = 0; i < 4; ++i) {
      c[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(b[2 * i], b[2 * i + 1]),
                              _mm512_unpackhi_epi64(b[2 * i], b[2 * i + 1]));
    }
    const __m512i d0 = _mm512_add_epi32(_mm512_shuffle_i32x4(c[0], c[1], 0x88),
                                        _mm512_shuffle_i32x4(c[0], c[1], 0xdd));
    const __m512i d1 = _mm512_add_epi32(_mm512_shuffle_i32x4(c[2], c[3], 0x88),
                                        _mm512_shuffle_i32x4(c[2], c[3], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(d0, d1, 0x88), _mm512_shuffle_i32x4(d0, d1, 0xdd));
  }
  static float top(reg x) { return _mm512_reduce_max_ps(x); }

  // As exp4 in numerics.hpp: about 1e-7 relative, 0 below -87.
  static reg exp(reg x) {
    const reg bounded = _mm512_min_ps(set1(88.0F), x);  // NaN stays
    const reg n = _mm512_roundscale_ps(mul(bounded, set1(1.44269504F)),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    reg r = _mm512_fnmadd_ps(n, set1(0.693359375F), bounded);
    r = fmadd(n, set1(2.12194440e-4F), r);
    reg p = fmadd(r, set1(1.0F / 5040), set1(1.0F / 720));
    p = fmadd(p, r, set1(1.0F / 120));
    p = fmadd(p, r, set1(1.0F / 24));
    p = fmadd(p, r, set1(1.0F / 6));
    p = fmadd(p, r, set1(0.5F));
    p = fmadd(p, r, set1(1.0F));
    p = fmadd(p, r, set1(1.0F));
    const __m512i power =
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    const __mmask16 stays = _mm512_cmp_ps_mask(x, set1(-87.0F), _CMP_NLT_UQ);
    return _mm512_maskz_mul_ps(stays, p, _mm512_castsi512_ps(power));
  }

  struct double_sums {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(reg x) {
      low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
      high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
    }
    void store(double* p) const {
      _mm512_storeu_pd(p, low);
      _mm512_storeu_pd(p + 8, high);
    }
  };
};

// 64 codes as unsigned bytes k + 128; where `count` < 64 the rest is 128 and meets digits of zero.
inline __m512i biased_codes(const std::int8_t* p, int count) {
  const __m512i bias = _mm512_set1_epi8(static_cast<char>(0x80));
  if (count >= 64) return _mm512_xor_si512(_mm512_loadu_si512(p), bias);
  const auto mask = (std::uint64_t{1} << count) - 1;
  return _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, p), bias);
}

// out[g] lane r = K row r . digits of head g, exactly, for 16 rows: VNNI multiplies unsigned by
// signed bytes, so it is given k + 128, and 128 * sum(q) is taken off at the end.
template <int heads>
[[gnu::always_inline]] inline void integer_block(const digit_row* q, int dim,
                                                 const std::int8_t* const* rows, __m512i* out) {
  constexpr int tokens = heads == 1 ? 4 : 2;
  __m512i partial[heads][16];
  for (int at = 0; at < 16; at += tokens) {
    __m512i high[heads][tokens], low[heads][tokens];
    for (int g = 0; g < heads; ++g) {
      for (int t = 0; t < tokens; ++t) high[g][t] = low[g][t] = _mm512_setzero_si512();
    }
    for (int c = 0; c < dim; c += 64) {
      __m512i k[tokens];
      for (int t = 0; t < tokens; ++t) k[t] = biased_codes(rows[at + t] + c, dim - c);
      for (int g = 0; g < heads; ++g) {
        const __m512i hi = _mm512_load_si512(q[g].hi + c), lo = _mm512_load_si512(q[g].lo + c);
        for (int t = 0; t < tokens; ++t) {
          high[g][t] = _mm512_dpbusd_epi32(high[g][t], k[t], hi);
          low[g][t] = _mm512_dpbusd_epi32(low[g][t], k[t], lo);
        }
      }
    }
    for (int g = 0; g < heads; ++g) {
      for (int t = 0; t < tokens; ++t) {
        partial[g][at + t] = _mm512_add_epi32(_mm512_slli_epi32(high[g][t], 7), low[g][t]);
      }
    }
  }
  for (int g = 0; g < heads; ++g) {
    out[g] =
        _mm512_sub_epi32(avx512_lanes::integer_sums(partial[g]), _mm512_set1_epi32(128 * q[g].sum));
  }
}

// Pointers to the job's 16 rows from `begin` on; past the end they repeat the last one.
template <bool scattered>
struct row_block {
  const std::int8_t* rows[16];
  int count;
  row_block(const score_job<std::int8_t>& job, std::int64_t begin)
      : count(job.n - begin < 16 ? static_cast<int>(job.n - begin) : 16) {
    if (!scattered || job.together(begin, count)) {
      const std::int8_t* first = scattered ? job.row(begin) : job.rows + begin * job.dim;
      for (int r = 0; r < 16; ++r) {
        rows[r] = first + std::int64_t{r < count ? r : count - 1} * job.dim;
      }
    } else {
      for (int r = 0; r < 16; ++r) rows[r] = job.row(begin + (r < count ? r : count - 1));
    }
  }
};

template <int heads, bool scattered>
void score_integers(const score_job<std::int8_t>& job, const digit_row* q, int first_head,
                    std::int64_t begin) {
  const row_block<scattered> block(job, begin);
  __m512i integers[heads];
  integer_block<heads>(q, job.dim, block.rows, integers);
  __m512 scale = _mm512_set1_ps(1.0F);
  if (job.scale != nullptr) scale = avx512_lanes::widen_first(job.scale + begin, block.count);
  for (int g = 0; g < heads; ++g) {
    const __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(integers[g]), _mm512_set1_ps(q[g].scale));
    avx512_lanes::store_first(job.scores + (first_head + g) * job.stride + begin,
                              _mm512_mul_ps(x, scale), block.count);
  }
}

// Up to four heads: their digits, then all rows.
template <bool scattered>
void score_all(const score_job<std::int8_t>& job) {
  digit_row q[lanes::heads_at_once];
  for (int first = 0; first < job.group; first += lanes::heads_at_once) {
    const int left = job.group - first;
    const int heads = left < lanes::heads_at_once ? left : lanes::heads_at_once;
    for (int g = 0; g < heads; ++g) {
      split_query(job.q + std::int64_t{first + g} * job.dim, job.dim, q[g]);
    }
    for (std::int64_t begin = 0; begin < job.n; begin += 16) {
      switch (heads) {
        case 1:
          score_integers<1, scattered>(job, q, first, begin);
          break;
        case 2:
          score_integers<2, scattered>(job, q, first, begin);
          break;
        case 3:
          score_integers<3, scattered>(job, q, first, begin);
          break;
        default:
          score_integers<4, scattered>(job, q, first, begin);
      }
    }
  }
}

void score_int8(const score_job<std::int8_t>& job) {
  job.scattered() ? score_all<true>(job) : score_all<false>(job);
}

void digit_scores(const digit_row& query, int dim, const std::int8_t* codes, std::int64_t n,
                  std::int32_t* out) {
  const score_job<std::int8_t> job = {nullptr, 1, dim, codes, nullptr, n, nullptr, 0};
  for (std::int64_t begin = 0; begin < n; begin += 16) {
    const row_block<false> block(job, begin);
    __m512i integers;
    integer_block<1>(&query, dim, block.rows, &integers);
    _mm512_mask_storeu_epi32(out + begin, avx512_lanes::first(block.count), integers);
  }
}

}  // namespace

const inner_loops avx512_loops = {
    .score_int8 = score_int8,
    .score_half = lanes::score_rows<avx512_lanes, half_bits>,
    .score_float = lanes::score_rows<avx512_lanes, float>,
    .add_int8 = lanes::add_rows<avx512_lanes, std::int8_t>,
    .add_half = lanes::add_rows<avx512_lanes, half_bits>,
    .add_float = lanes::add_rows<avx512_lanes, float>,
    .digit_scores = digit_scores,
    .softmax = lanes::softmax<avx512_lanes>,
    .exponentials = lanes::exponentials<avx512_lanes>,
    .times_halves = lanes::times_halves<avx512_lanes>,
    .numbers8 = lanes::numbers8<avx512_lanes>,
    .numbers4 = lanes::numbers4<avx512_lanes>,
    .from_halves = lanes::from_halves<avx512_lanes>,
    .to_halves = lanes::to_halves<avx512_lanes>,
    .score_tile = lanes::score_tile<avx512_lanes>,
};

}  // namespace kvreplay::kernels
