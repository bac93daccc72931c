#include "traces/float16.hpp"

#include <cmath>
#include <limits>

#include "traces/layout.hpp"
#include "traces/test_support.hpp"

namespace kvreplay::traces {

using namespace testing;

namespace {

// Independent of the conversion under test: from the definition of binary16.
double half_value(unsigned bits) {
  const double sign = bits & 0x8000u ? -1 : 1;
  const int exponent = static_cast<int>(bits >> 10 & 31u),
            mantissa = static_cast<int>(bits & 1023u);
  if (exponent == 31) return mantissa ? NAN : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

}  // namespace

TEST_CASE("every float16 pattern widens to its value and narrows back") {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<half_bits>(bits);
    const double want = half_value(bits);
    const float found = half_to_float(half);
    CHECK(half_is_finite(half) == std::isfinite(want));
    if (std::isnan(want)) {
      CHECK(std::isnan(found));
      continue;
    }
    CHECK(static_cast<double>(found) == want);
    CHECK(std::signbit(found) == std::signbit(want));
    CHECK(float_to_half(found) == half);
  }
}

TEST_CASE("narrowing rounds to nearest even, also below 2^-14") {
  // Each between two neighbours of binary16, found by exhaustive search over all patterns.
  for (const float value : {6.1034e-5f, 1.5249286e-5f, 0.99995f * 0x1p-20f, 5.96e-8f, 2.9e-8f,
                            1.0f / 3, 65503.9f, 1e-4f}) {
    double best = HUGE_VAL;
    unsigned nearest = 0;
    for (unsigned bits = 0; bits < 0x7c00u; ++bits) {
      const double distance = std::fabs(half_value(bits) - static_cast<double>(value));
      if (distance < best || (distance == best && bits % 2 == 0)) {
        best = distance;
        nearest = bits;
      }
    }
    CAPTURE(value);
    CHECK(float_to_half(value) == nearest);
  }
  CHECK(float_to_half(65519.99f) == 0x7bff);
  CHECK(float_to_half(65520.0f) == 0x7c00);
  CHECK(fits_half(65519.0f));
  CHECK_FALSE(fits_half(65520.0f));
  CHECK_FALSE(fits_half(-65520.0f));
}

TEST_CASE("all patterns survive the way through a file, bit by bit") {
  // 65536 patterns as k rows; what is not finite goes in behind the writer, which refuses it.
  const temp_folder folder;
  const std::string path = folder / "patterns.h5";
  model_info m = small_model(1);
  m.n_kv_heads = m.n_q_heads = 1;
  m.head_dim = 64;
  sequence_plan p = small_plan(1, 1024);
  write_small(path, m, p);
  std::vector<half_bits> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<half_bits>(i);
  edit(path, [&](hid_t file) {
    const h5::handle type = h5::float16_type();
    make_dataset(file, "/sequences/0/layers/0/k", {1024, 1, 64}, type.get(), patterns.data(),
                 {512, 1, 64});
  });
  const reader file(path, {.check_data = false});
  CHECK(file.read_layer(0, 0, 0, 1024).k == patterns);
  CHECK(file.read_layer(0, 0, 1000, 1001).k ==
        std::vector<half_bits>(patterns.begin() + 64000, patterns.begin() + 64064));
}

TEST_CASE("the writer narrows float32 itself") {
  const temp_folder folder;
  const std::string path = folder / "narrow.h5";
  model_info m = small_model(1);
  sequence_plan p = small_plan(1, 1);
  p.confidence = false;
  writer out(path, m, "test");
  out.begin_sequence(p);
  put_steps(out, m, p, 0, 1);
  std::vector<float> o(12, 0.25f);
  o[0] = 6.1034e-5f;
  o[1] = 1.5249286e-5f;
  o[2] = 0.99995f * 0x1p-20f;
  out.put_o(0, 0, o);
  check_message(error_of([&] {
                  std::vector<float> bad = o;
                  bad[7] = 65520;
                  out.put_o(0, 0, bad);
                }),
                path + ".part", {"layers/0/o", "65520", "float16's range"});
  check_message(error_of([&] {
                  std::vector<float> bad = o;
                  bad[7] = NAN;
                  out.put_o(0, 0, bad);
                }),
                path + ".part", {"layers/0/o", "nan", "finite"});
  check_message(error_of([&] {
                  std::vector<half_bits> bad = half_rows(0, 1, 15);
                  bad[3] = 0x7c00;
                  out.put_k(0, 0, bad);
                }),
                path + ".part", {"layers/0/k", "inf", "float16's range"});
  out.end_sequence();
  out.finish();
  const layer_slice slice = reader(path).read_layer(0, 0, 0, 1);
  for (size_t i = 0; i < o.size(); ++i) {
    CHECK(slice.o[i] == static_cast<float>(static_cast<binary16>(o[i])));
  }
}

TEST_CASE("offsets and counts are 64-bit before the multiply") {
  // 8 heads of 128: position 2,097,152 lies beyond 2^31 values.
  CHECK(row_offset(2097152, 8, 7, 128, 127) == std::int64_t{2097152} * 1024 + 7 * 128 + 127);
  CHECK(row_offset(2147483647, 128, 127, 256, 255) == 70368744177663);
  const std::int64_t big[] = {std::int64_t{1} << 31, 128, 256};
  CHECK(element_count(big) == std::int64_t{1} << 46);
  const std::int64_t overflow[] = {std::int64_t{1} << 62, 4, 4};
  CHECK_FALSE(element_count(overflow).has_value());
  const std::int64_t empty[] = {std::int64_t{1} << 62, 0, std::int64_t{1} << 62};
  CHECK(element_count(empty) == 0);
  const std::int64_t negative[] = {-1, 3};
  CHECK_FALSE(element_count(negative).has_value());
}

}  // namespace kvreplay::traces
