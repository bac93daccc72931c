// What the checks share: repeatable numbers, a report, and a KV head that exists twice, as numbers
// on the host and in device memory with poison beyond its lengths.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device_memory.cuh"
#include "kernels/device_storage.cuh"
#include "kernels/half.hpp"

namespace kvreplay::kernels::gpu_check {

using device::device_buffer;
using device::from_device;
using device::to_device;

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr half_bits half_nan = 0x7e00;

// Knuth's MMIX generator.
class numbers {
 public:
  explicit numbers(std::uint64_t seed) : state_(seed * 2 + 1) {}
  double uniform() {  // [0, 1)
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 11) * 0x1p-53;
  }
  float normal() {  // the sum of twelve uniforms
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return static_cast<float>(sum);
  }
  int below(int n) { return static_cast<int>(uniform() * n); }
  std::vector<float> normals(std::int64_t n) {
    std::vector<float> x(at(n));
    for (float& v : x) v = normal();
    return x;
  }

 private:
  std::uint64_t state_;
};

// Errors of one comparison in units of 1 + |expected|; NaN counts as infinite.
struct error_meter {
  double worst = 0;
  void see(double got, double want) {
    const double error = got == want ? 0 : std::fabs(got - want) / (1 + std::fabs(want));
    if (!(error <= worst)) worst = error >= 0 ? error : INFINITY;
  }
};

class report {
 public:
  void see(const std::string& what, double error, double limit) {
    ++checks_;
    if (error <= limit) return;
    ++failed_;
    std::printf("FAILED %s: error %.3g, limit %.3g\n", what.c_str(), error, limit);
  }
  void see(const std::string& what, bool good) { see(what, good ? 0.0 : 1.0, 0.0); }
  int checks() const { return checks_; }
  int failed() const { return failed_; }

 private:
  int checks_ = 0, failed_ = 0;
};

struct head_plan {
  int body, tail, head_dim, value_dim;
};

// Random entries of one head. Positions are distinct and ascend: body first.
class twin_head {
 public:
  twin_head(const head_plan& p, numbers& random, int spare)
      : plan(p),
        body_k(codes(p.body * p.head_dim, random)),
        body_v(codes(p.body * p.value_dim, random)),
        tail_k(halves(p.tail * p.head_dim, random)),
        tail_v(halves(p.tail * p.value_dim, random)),
        k_channel(channels(p.head_dim, random)),
        v_channel(channels(p.value_dim, random)) {
    for (int i = 0; i < p.body; ++i) {
      k_scale.push_back(float_to_half(static_cast<float>(0.004 + 0.01 * random.uniform())));
      v_scale.push_back(float_to_half(static_cast<float>(0.004 + 0.01 * random.uniform())));
    }
    for (int i = 0; i < p.body + p.tail; ++i) {
      positions.push_back(2 * i);
      scores.push_back(random.below(3) == 0 ? -1.0F : static_cast<float>(random.below(9)) / 8);
    }
    upload(spare);
  }

  device::head_storage* on_device() const { return storage_->get(); }
  device::head_storage read() const { return storage_->read()[0]; }
  // A device array of this head, from the copy of its struct.
  template <class T>
  std::vector<T> read(const T* p, std::int64_t n) const {
    std::vector<T> x(at(n));
    if (n > 0) from_device(x.data(), p, x.size() * sizeof(T));
    return x;
  }

  // Row `entry` of keys or values in double.
  std::vector<double> row(int entry, bool values) const {
    const int dim = values ? plan.value_dim : plan.head_dim;
    std::vector<double> out;
    for (int c = 0; c < dim; ++c) {
      if (entry < plan.body) {
        const double scalar = half_to_float((values ? v_scale : k_scale)[at(entry)]);
        const double channel = (values ? v_channel : k_channel)[at(c)];
        out.push_back((values ? body_v : body_k)[at(entry * dim + c)] * scalar * channel);
      } else {
        out.push_back(half_to_float((values ? tail_v : tail_k)[at((entry - plan.body) * dim + c)]));
      }
    }
    return out;
  }

  head_plan plan;
  std::vector<std::int8_t> body_k, body_v;
  std::vector<half_bits> tail_k, tail_v, k_scale, v_scale;
  std::vector<float> k_channel, v_channel, scores;
  std::vector<std::int32_t> positions;

 private:
  static std::vector<std::int8_t> codes(std::int64_t n, numbers& random) {
    std::vector<std::int8_t> x(at(n));
    for (auto& v : x) v = static_cast<std::int8_t>(random.below(255) - 127);
    return x;
  }
  static std::vector<half_bits> halves(std::int64_t n, numbers& random) {
    std::vector<half_bits> x(at(n));
    for (auto& v : x) v = float_to_half(random.normal());
    return x;
  }
  static std::vector<float> channels(int n, numbers& random) {
    std::vector<float> x(at(n));
    for (auto& v : x) v = static_cast<float>(0.5 + random.uniform());
    return x;
  }

  template <class T>
  T* keep(std::vector<T> x, std::size_t room, T poison, std::vector<device_buffer<T>>& kept) {
    x.resize(room, poison);
    kept.emplace_back(x);
    return kept.back().get();
  }

  void upload(int spare) {
    const auto body = at((plan.body + spare + 15) / 16 * 16), tail = at(plan.tail + spare + 16);
    device::head_storage s;
    s.body_k = keep(body_k, body * at(plan.head_dim), std::int8_t{99}, int8_);
    s.body_v = keep(body_v, body * at(plan.value_dim), std::int8_t{99}, int8_);
    s.tail_k = keep(tail_k, tail * at(plan.head_dim), half_nan, half_);
    s.tail_v = keep(tail_v, tail * at(plan.value_dim), half_nan, half_);
    s.body_k_scale = keep(k_scale, body, half_nan, half_);
    s.body_v_scale = keep(v_scale, body, half_nan, half_);
    const auto split = positions.begin() + plan.body;
    s.body_position = keep({positions.begin(), split}, body, -7, int_);
    s.tail_position = keep({split, positions.end()}, tail, -7, int_);
    const auto score = scores.begin() + plan.body;
    s.body_score = keep({scores.begin(), score}, body, nan, float_);
    s.tail_score = keep({score, scores.end()}, tail, nan, float_);
    s.k_channel_scale = keep(k_channel, k_channel.size(), nan, float_);
    s.v_channel_scale = keep(v_channel, v_channel.size(), nan, float_);
    s.body = plan.body;
    s.tail = plan.tail;
    s.body_capacity = static_cast<int>(body);
    s.tail_capacity = static_cast<int>(tail);
    storage_ =
        std::make_unique<device_buffer<device::head_storage>>(std::vector<device::head_storage>{s});
  }

  std::vector<device_buffer<std::int8_t>> int8_;
  std::vector<device_buffer<half_bits>> half_;
  std::vector<device_buffer<std::int32_t>> int_;
  std::vector<device_buffer<float>> float_;
  std::unique_ptr<device_buffer<device::head_storage>> storage_;
};

}  // namespace kvreplay::kernels::gpu_check
