// The loops over AVX2 registers of eight floats, with FMA and F16C. Built with those instructions
// enabled for this file alone: see lane_loops.hpp for what that forbids.
#include <immintrin.h>

#include "kernels/lane_loops.hpp"

namespace kvreplay::kernels {
namespace {

// Lane j of the mask that starts at 8 - n is set for j < n.
alignas(32) constexpr std::int32_t lane_masks[16] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                     0,  0,  0,  0,  0,  0,  0,  0};

struct avx2_lanes {
  using reg = __m256;
  static constexpr int width = 8;
  // For 1 .. 4 heads: rows, and registers of channels, worked on at once, such that the sums hide
  // the latency of FMA and fit 16 registers beside the operands.
  static constexpr int tokens_of[] = {4, 4, 2, 2};
  static constexpr int slabs_of[] = {8, 4, 2, 2};

  static reg zero() { return _mm256_setzero_ps(); }
  static reg set1(float x) { return _mm256_set1_ps(x); }
  static reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, reg x) { _mm256_storeu_ps(p, x); }
  static __m256i first(int n) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lane_masks + 8 - n));
  }
  static reg load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store_first(float* p, reg x, int n) { _mm256_maskstore_ps(p, first(n), x); }

  static reg widen(const float* p) { return load(p); }
  static reg widen(const half_bits* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static reg widen(const std::int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  static reg widen_low(const std::int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return widen_codes(_mm_and_si128(bytes, _mm_set1_epi8(15)));
  }
  static reg widen_high(const std::int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return widen_codes(_mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15)));
  }
  static reg widen_codes(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
  static reg widen_first(const float* p, int n) { return load_first(p, n); }
  template <class T>
  static reg widen_first(const T* p, int n) {
    T values[width] = {};
    for (int i = 0; i < n; ++i) values[i] = p[i];
    return widen(values);
  }
  static void narrow(reg x, half_bits* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static reg fmadd(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  // The instruction returns its second operand where either is NaN.
  static reg greater_or(reg x, reg y) { return _mm256_max_ps(x, y); }

  static reg sums(const reg* p) {
    const reg a = _mm256_hadd_ps(_mm256_hadd_ps(p[0], p[1]), _mm256_hadd_ps(p[2], p[3]));
    const reg b = _mm256_hadd_ps(_mm256_hadd_ps(p[4], p[5]), _mm256_hadd_ps(p[6], p[7]));
    return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  static float top(reg x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }

  // As exp4 in numerics.hpp: about 1e-7 relative, 0 below -87.
  static reg exp(reg x) {
    const reg bounded = _mm256_min_ps(set1(88.0F), x);  // NaN stays
    const reg n = _mm256_round_ps(mul(bounded, set1(1.44269504F)),
                                  _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    reg r = _mm256_fnmadd_ps(n, set1(0.693359375F), bounded);
    r = fmadd(n, set1(2.12194440e-4F), r);
    reg p = fmadd(r, set1(1.0F / 5040), set1(1.0F / 720));
    p = fmadd(p, r, set1(1.0F / 120));
    p = fmadd(p, r, set1(1.0F / 24));
    p = fmadd(p, r, set1(1.0F / 6));
    p = fmadd(p, r, set1(0.5F));
    p = fmadd(p, r, set1(1.0F));
    p = fmadd(p, r, set1(1.0F));
    const __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const reg vanishes = _mm256_cmp_ps(x, set1(-87.0F), _CMP_LT_OQ);
    return _mm256_andnot_ps(vanishes, mul(p, _mm256_castsi256_ps(power)));
  }

  struct double_sums {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    void add(reg x) {
      low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
      high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
    }
    void store(double* p) const {
      _mm256_storeu_pd(p, low);
      _mm256_storeu_pd(p + 4, high);
    }
  };
};

// 16 channels at a time as int16: products of a code and a 15-bit value, and sums of two of them,
// are exact in int32.
void digit_scores(const digit_row& query, int dim, const std::int8_t* codes, std::int64_t n,
                  std::int32_t* out) {
  alignas(32) std::int16_t values[digit_row_size];
  for (int c = 0; c < digit_row_size; ++c) {
    values[c] = static_cast<std::int16_t>(digit_base * query.hi[c] + query.lo[c]);
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int8_t* row = codes + i * dim;
    __m256i sum = _mm256_setzero_si256();
    int c = 0;
    for (; c + 16 <= dim; c += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + c));
      const __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(values + c));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes), q));
    }
    alignas(32) std::int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
    std::int32_t total = 0;
    for (const std::int32_t x : lanes) total += x;
    for (; c < dim; ++c) total += values[c] * row[c];
    out[i] = total;
  }
}

}  // namespace

const inner_loops avx2_loops = {
    .score_int8 = lanes::score_rows<avx2_lanes, std::int8_t>,
    .score_half = lanes::score_rows<avx2_lanes, half_bits>,
    .score_float = lanes::score_rows<avx2_lanes, float>,
    .add_int8 = lanes::add_rows<avx2_lanes, std::int8_t>,
    .add_half = lanes::add_rows<avx2_lanes, half_bits>,
    .add_float = lanes::add_rows<avx2_lanes, float>,
    .digit_scores = digit_scores,
    .softmax = lanes::softmax<avx2_lanes>,
    .exponentials = lanes::exponentials<avx2_lanes>,
    .times_halves = lanes::times_halves<avx2_lanes>,
    .numbers8 = lanes::numbers8<avx2_lanes>,
    .numbers4 = lanes::numbers4<avx2_lanes>,
    .from_halves = lanes::from_halves<avx2_lanes>,
    .to_halves = lanes::to_halves<avx2_lanes>,
    .score_tile = lanes::score_tile<avx2_lanes>,
};

}  // namespace kvreplay::kernels
