// append and age of the device on the host emulator against the host's, entry by entry to the bit.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/quantise_device.cuh"
#include "kernels/simt/device_copy.hpp"
#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using device::append_batch;
using device::append_head;
using testing::at;
using testing::entries_of;
using testing::head_copy;
using testing::numbers;

append_batch batch_of(const kv_cache& cache, const std::vector<append_head>& heads) {
  append_batch batch;
  batch.heads = heads.data();
  batch.head_count = static_cast<int>(heads.size());
  batch.head_dim = cache.shape().head_dim;
  batch.value_dim = cache.shape().value_dim;
  batch.window = cache.format().tail_window;
  batch.sinks = cache.format().tail_sinks;
  batch.ages = cache.format().body != body_format::none;
  return batch;
}

// Runs `steps` steps on both sides; returns the number of heads whose entries differ at the end.
int differing_heads(kv_cache cache, int steps, numbers& random) {
  const cache_shape& shape = cache.shape();
  std::vector<head_copy> copies;
  copies.reserve(at(shape.kv_heads));
  for (int h = 0; h < shape.kv_heads; ++h) copies.emplace_back(cache.head(0, h), shape, steps + 32);
  const std::int32_t first = 1 + cache.positions(0, 0).back();
  for (std::int32_t p = first; p < first + steps; ++p) {
    const auto k = random.normals(shape.kv_heads * shape.head_dim);
    const auto v = random.normals(shape.kv_heads * shape.value_dim);
    testing::append_one(cache, 0, p, k, v);
    age(cache, 0, p);
    std::vector<append_head> heads;
    for (int h = 0; h < shape.kv_heads; ++h) {
      heads.push_back({&copies[at(h)].storage, k.data() + h * shape.head_dim,
                       v.data() + h * shape.value_dim, p});
    }
    const simt::scheduled with({static_cast<std::uint64_t>(p)});
    launch_append(batch_of(cache, heads), {});
  }
  int differing = 0;
  for (int h = 0; h < shape.kv_heads; ++h) {
    const device::head_storage& s = copies[at(h)].storage;
    const bool same = entries_of(cache.head(0, h), shape) == entries_of(s, shape);
    differing += same && s.fault == 0 && s.body + s.tail == cache.entries(0, h) ? 0 : 1;
  }
  return differing;
}

TEST_CASE("device append: entries age into the host's codes under every schedule") {
  for (const scale_format scales : {scale_format::hybrid, scale_format::token}) {
    for (const int dim : {1, 48, 64, 128}) {
      numbers random(static_cast<std::uint64_t>(dim));
      storage_format format = testing::int8_format(scales, 8);
      format.tail_sinks = 2;
      kv_cache cache(testing::small_shape(4, 2, dim, dim + 3), format);
      testing::fill(cache, 0, 0, 20, random);
      CAPTURE(dim);
      CHECK(differing_heads(cache, 12, random) == 0);
    }
  }
}

TEST_CASE("device append: many entries may age at once, and none in an FP16 cache" *
          doctest::test_suite("races")) {
  numbers random(2);
  kv_cache late(testing::small_shape(2, 2, 64), testing::int8_format(scale_format::token, 4));
  testing::fill(late, 0, 0, 40, random, false);
  CHECK(differing_heads(late, 3, random) == 0);
  kv_cache half(testing::small_shape(2, 1, 64), storage_format{});
  testing::fill(half, 0, 0, 200, random);
  CHECK(differing_heads(half, 3, random) == 0);
}

TEST_CASE("device append: scalars are the host's at every size of row") {
  std::vector<float> sizes = {0.0F, 1e-30F, 0x1p-14F * 127, 1.0F, 65504.0F, 65504.0F * 126};
  numbers random(3);
  for (int i = 0; i < 2000; ++i) {
    sizes.push_back(std::ldexp(static_cast<float>(random.uniform()), random.below(30) - 14));
  }
  int wrong = 0;
  for (const float x : sizes) wrong += device::token_scale_bits(x) == token_scale(x) ? 0 : 1;
  CHECK(wrong == 0);
}

TEST_CASE("device append: faults are noted and lengths stay") {
  numbers random(4);
  kv_cache cache(testing::small_shape(1, 1, 16), testing::int8_format(scale_format::token, 4));
  testing::fill(cache, 0, 0, 10, random);
  const auto fault_after = [&](float value, int spare) {
    head_copy copy(cache.head(0, 0), cache.shape(), spare);
    std::vector<float> k(16, 1.0F), v(16, 1.0F);
    v[5] = value;
    const std::vector<append_head> heads = {{&copy.storage, k.data(), v.data(), 10}};
    launch_append(batch_of(cache, heads), {});
    if (copy.storage.fault == 0) {
      CHECK(copy.storage.tail == cache.head(0, 0).tail_size());
      CHECK(copy.storage.body == cache.head(0, 0).body_size() + 1);
    }
    return copy.storage.fault;
  };
  CHECK(fault_after(1.0F, 16) == 0);
  CHECK(fault_after(NAN, 16) == device::fault_not_finite);
  CHECK(fault_after(1e6F, 16) == device::fault_not_finite);
  CHECK(fault_after(1.0F, 0) == device::fault_no_room);
}

TEST_CASE("device append: a row too large for its scalar is a fault") {
  numbers random(5);
  kv_cache cache(testing::small_shape(1, 1, 16), testing::int8_format(scale_format::hybrid, 4));
  testing::fill(cache, 0, 0, 10, random);
  const std::vector<float> tiny(16, 1e-9F), row(16, 60000.0F);
  head_copy copy(cache.head(0, 0), cache.shape(), 16);
  copy.storage.k_channel_scale = tiny.data();
  const std::vector<append_head> heads = {{&copy.storage, row.data(), row.data(), 10}};
  launch_append(batch_of(cache, heads), {});
  CHECK(copy.storage.fault == device::fault_scale_range);
}

TEST_CASE("device append: batches that cannot be are refused") {
  append_batch batch;
  CHECK_THROWS_WITH_AS(launch_append(batch, {}), "append on the device: there are no heads",
                       simt::failure);
  const append_head head;
  batch.heads = &head;
  batch.head_count = 1;
  CHECK_THROWS_AS(launch_append(batch, {}), simt::failure);
  batch.head_dim = batch.value_dim = 8;
  batch.window = -1;
  CHECK_THROWS_AS(launch_append(batch, {}), simt::failure);
}

}  // namespace
}  // namespace kvreplay::kernels
