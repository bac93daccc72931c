// full_lane: the reference of the closed loop. Everything is kept at the precision of the cache, so
// no policy is needed: whole blocks of rows attend as matrix products, as in a recording.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_cache.hpp"
#include "replay/layer_data.hpp"
#include "tracer/full_attention.hpp"
#include "tracer/model.hpp"

namespace kvreplay::replay {

class full_lane {
 public:
  // shape: all layers of the model. Room for n_tokens positions.
  full_lane(kernels::cache_shape shape, std::int64_t n_tokens);

  // Rows first .. of a block, whose k and v join those of the layer. q, k, v hold what the cache
  // would (rounded where it is 16 bits wide); o is filled, lse [rows, q_heads] too.
  void attend(int layer, std::int64_t first, std::int64_t rows, const float* q, const float* k,
              const float* v, float* o, std::vector<float>& lse);

  // The rows of a layer so far: [positions, kv_heads, ...].
  const float* k(int layer) const { return k_[static_cast<size_t>(layer)].data(); }
  const float* v(int layer) const { return v_[static_cast<size_t>(layer)].data(); }
  tracer::full_attention_shape shape_of(int layer) const;

  template <class Visit>
  void for_each_state(Visit&& visit) {
    for (auto* rows : {&k_, &v_}) {
      for (auto& layer : *rows) visit(layer);
    }
  }

 private:
  kernels::cache_shape shape_;
  std::vector<std::vector<float>> k_, v_;  // [layers][n_tokens, kv_heads, dim]
};

}  // namespace kvreplay::replay
