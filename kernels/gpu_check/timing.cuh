// Times of attend with mass and score update for whole models, against copying the same bytes and
// against an FP16 cache of full length. CUDA events, caches flushed before every run.
#pragma once

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "kernels/attend_launch.cuh"
#include "kernels/gpu_check/check_support.hpp"

namespace kvreplay::kernels::gpu_check {

struct model_shape {
  const char* name;
  int layers, q_heads, kv_heads, head_dim;
};
constexpr model_shape models[] = {{"GPT-2", 12, 12, 12, 64},
                                  {"SmolLM2-135M", 30, 9, 3, 64},
                                  {"Llama-3.1-8B", 32, 32, 8, 128},
                                  {"Qwen2.5-32B", 64, 40, 8, 128}};
constexpr int timed_runs = 9;
constexpr std::size_t flush_bytes = std::size_t{256} << 20;  // more than any second-level cache

class event_timer {
 public:
  event_timer() {
    device::require(cudaEventCreate(&begin_), "cudaEventCreate");
    device::require(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~event_timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  event_timer(const event_timer&) = delete;
  event_timer& operator=(const event_timer&) = delete;

  // Median microseconds of `work` after the caches have been filled with something else.
  template <class Work>
  double median(const device_buffer<std::uint8_t>& flush, Work work) {
    std::vector<float> times;
    for (int i = 0; i <= timed_runs; ++i) {
      device::require(cudaMemsetAsync(flush.get(), i, flush.size()), "cudaMemset");
      device::require(cudaEventRecord(begin_), "cudaEventRecord");
      work();
      device::require(cudaEventRecord(end_), "cudaEventRecord");
      device::require(cudaEventSynchronize(end_), "the timed work");
      float milliseconds = 0;
      device::require(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
      if (i > 0) times.push_back(milliseconds * 1000);  // the first run loads the code
    }
    std::nth_element(times.begin(), times.begin() + timed_runs / 2, times.end());
    return static_cast<double>(times[timed_runs / 2]);
  }

 private:
  cudaEvent_t begin_{}, end_{};
};

// Bytes that look like codes and like small halves alike, different everywhere.
struct fill_job {
  std::uint32_t* words;
  std::int64_t count;
};
SIMT_KERNEL fill_kernel(fill_job job) {
  const std::int64_t step = std::int64_t{simt::grid_x()} * simt::block_size();
  for (std::int64_t i = std::int64_t{simt::block_x()} * simt::block_size() + simt::thread_index();
       i < job.count; i += step) {
    std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761u;
    x ^= x >> 15;
    job.words[i] = x & 0xb7ffb7ffu;  // halves stay below 1/2: no NaN, no infinity
  }
}

// The caches of all (sequence, layer, KV head) of one model in a few large arrays.
class timed_model {
 public:
  timed_model(const model_shape& m, int batch, int body, int tail)
      : model_(m),
        heads_(batch * m.layers * m.kv_heads),
        body_(body),
        tail_(tail),
        codes_(bytes(body, 1) * 2),
        halves_(bytes(tail, 2) * 2),
        scalars_(at(heads_) * padded() * 2),
        small_(at(heads_) * (at(body + tail) + at(group()) * at(3 * m.head_dim + 1))),
        scores_(at(heads_) * at(group()) * at(body + tail)) {
    fill(codes_.get(), codes_.size());
    fill(halves_.get(), halves_.size());
    fill(reinterpret_cast<std::uint8_t*>(scalars_.get()), scalars_.size() * 2);
    fill(reinterpret_cast<std::uint8_t*>(small_.get()), small_.size() * 4);
    splits_ =
        std::clamp(264 / heads_ + (264 % heads_ != 0 ? 1 : 0), 1, std::max(1, (body + tail) / 256));
    build();
  }

  // Bytes that must move: keys, values, scalars, raw scores written and read, scores updated.
  double bytes_moved() const {
    const double entries = static_cast<double>(heads_) * (body_ + tail_);
    return static_cast<double>(codes_.size() + halves_.size() + scalars_.size() * 2) +
           entries * group() * 8 + entries * 8;
  }
  void run() const { launch_attend(batch_, device::attend_tier::automatic, {}); }

 private:
  int group() const { return model_.q_heads / model_.kv_heads; }
  std::size_t padded() const { return at((body_ + 15) / 16 * 16); }
  std::size_t bytes(int entries, int size) const {
    return at(heads_) * at(entries) * at(model_.head_dim) * at(size);
  }
  static void fill(std::uint8_t* p, std::size_t n) {
    if (n < 4) return;
    simt::launch(fill_kernel, {1024}, 256,
                 fill_job{reinterpret_cast<std::uint32_t*>(p), static_cast<std::int64_t>(n / 4)},
                 {});
  }

  void build() {
    const std::int64_t dim = model_.head_dim, g = group(), n = body_ + tail_;
    std::vector<device::head_storage> storage(at(heads_));
    std::vector<device::attend_head> views(at(heads_));
    auto* half = reinterpret_cast<std::uint16_t*>(halves_.get());
    auto* code = reinterpret_cast<std::int8_t*>(codes_.get());
    float* next = small_.get();
    stored_ = std::make_unique<device_buffer<device::head_storage>>(storage.size());
    for (std::int64_t h = 0; h < heads_; ++h) {
      device::head_storage& s = storage[at(h)];
      s.body_k = code + 2 * h * body_ * dim;
      s.body_v = s.body_k + body_ * dim;
      s.tail_k = half + 2 * h * tail_ * dim;
      s.tail_v = s.tail_k + tail_ * dim;
      s.body_k_scale = scalars_.get() + at(2 * h) * padded();
      s.body_v_scale = s.body_k_scale + padded();
      s.body_score = next;
      s.tail_score = next + body_;
      next += n;
      s.body = body_;
      s.tail = tail_;
      views[at(h)] = {stored_->get() + h, next,   nullptr, next + g * dim,
                      next + 2 * g * dim, nullptr};
      next += g * (2 * dim + 1);
    }
    to_device(stored_->get(), storage.data(), storage.size() * sizeof(storage[0]));
    views_ = std::make_unique<device_buffer<device::attend_head>>(views);
    const std::size_t rows = at(heads_) * at(splits_) * at(g);
    partial_ = std::make_unique<device_buffer<float>>(rows * at(dim + 2));
    batch_.heads = views_->get();
    batch_.head_count = heads_;
    batch_.group = static_cast<int>(g);
    batch_.head_dim = batch_.value_dim = model_.head_dim;
    batch_.softmax_scale = 0.125F;
    batch_.splits = splits_;
    batch_.most_entries = static_cast<int>(n);
    batch_.reduce = mass_layout::mean;
    batch_.rule = score_rule::ema;
    batch_.decay = 0.9F;
    batch_.scores = scores_.get();
    batch_.partial_o = partial_->get();
    batch_.partial_state = partial_->get() + rows * at(dim);
  }

  model_shape model_;
  int heads_, body_, tail_, splits_ = 1;
  device_buffer<std::uint8_t> codes_, halves_;
  device_buffer<std::uint16_t> scalars_;
  device_buffer<float> small_, scores_;
  std::unique_ptr<device_buffer<device::head_storage>> stored_;
  std::unique_ptr<device_buffer<device::attend_head>> views_;
  std::unique_ptr<device_buffer<float>> partial_;
  device::attend_batch batch_;
};

// Bytes read and written per second by a copy of 1 GiB.
inline double copy_bandwidth(event_timer& timer, const device_buffer<std::uint8_t>& flush) {
  const device_buffer<std::uint8_t> from(std::size_t{1} << 30), to(std::size_t{1} << 30);
  const double us = timer.median(flush, [&] {
    device::require(cudaMemcpyAsync(to.get(), from.get(), from.size(), cudaMemcpyDeviceToDevice),
                    "copy");
  });
  return 2.0 * static_cast<double>(from.size()) / us * 1e6;
}

inline void time_model(const model_shape& m, int context, int batch, double copy,
                       event_timer& timer, const device_buffer<std::uint8_t>& flush) {
  try {
    double int8_us, fp16_us, moved;
    {
      const timed_model int8(m, batch, context - 128, 128);
      int8_us = timer.median(flush, [&] { int8.run(); });
      moved = int8.bytes_moved();
    }
    {
      const timed_model fp16(m, batch, 0, context);
      fp16_us = timer.median(flush, [&] { fp16.run(); });
    }
    std::printf("%-14s %6d %3d  %10.1f %8.0f %6.1f%%  %10.1f %8.2fx\n", m.name, context, batch,
                int8_us, moved / int8_us * 1e-3, moved / int8_us * 1e8 / copy, fp16_us,
                fp16_us / int8_us);
  } catch (const simt::failure& e) {
    std::printf("%-14s %6d %3d  %s\n", m.name, context, batch, e.what());
    cudaGetLastError();  // a refused allocation is forgotten
  }
}

inline void print_times() {
  event_timer timer;
  const device_buffer<std::uint8_t> flush(flush_bytes);
  const double copy = copy_bandwidth(timer, flush);
  std::printf(
      "\ncopy: %.0f GB/s read and written. One decode step, all layers in one launch, mass "
      "and EMA included; caches cold; median of %d.\n",
      copy * 1e-9, timed_runs);
  std::printf("%-14s %6s %3s  %10s %8s %7s  %10s %9s\n", "model", "ctx", "seq", "INT8 us", "GB/s",
              "of copy", "FP16 us", "FP16/INT8");
  for (const model_shape& m : models) {
    for (const int context : {2048, 8192, 32768}) {
      for (const int batch : {1, 8}) {
        if (static_cast<std::int64_t>(context) * batch <= 65536) {
          time_model(m, context, batch, copy, timer, flush);
        }
      }
    }
  }
}

}  // namespace kvreplay::kernels::gpu_check
