// observe: the open-loop measures of one step of one policy, taken while S(t) stands.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "replay/full_reference.hpp"
#include "replay/measures.hpp"
#include "replay/replay_layer.hpp"

namespace kvreplay::replay {

// Positions of a named span of the trace.
struct span_mask {
  std::vector<std::uint8_t> member;                  // [n_tokens]
  std::int64_t count_below(std::int64_t end) const;  // members at positions < end
};

class step_observation {
 public:
  // One layer of one lane. `shape` has this layer as its layer 0; skip: decode steps that count for
  // nothing in the sums over steps (heads, spans).
  step_observation(const kernels::cache_shape& shape, const layer_data& data,
                   const full_reference& reference, std::span<const span_mask> spans,
                   const measured_parts& parts, std::int64_t skip)
      : shape_(&shape),
        data_(&data),
        reference_(&reference),
        spans_(spans),
        parts_(parts),
        skip_(skip) {}

  void operator()(const lane& lane, int slot, std::int64_t t, const float* o, const float* lse,
                  lane_measures& out);

 private:
  // Share of each query head's visible mass that the KV head's entries hold.
  void measure_recall(const kernels::head_store& store, int slot, int kv_head, std::int64_t t,
                      const float* lse, bool exact_scores, lane_measures& out);
  void find_kept_mass(std::int64_t t, int kv_head, const float* lse, bool exact_scores);
  double visible_mass(std::int64_t t, int q_head) const;
  void measure_spans(int slot, int kv_head, std::int64_t t, lane_measures& out);
  void measure_output(int slot, std::int64_t t, const float* o, lane_measures& out) const;

  const kernels::cache_shape* shape_;
  const layer_data* data_;
  const full_reference* reference_;
  std::span<const span_mask> spans_;
  measured_parts parts_;
  std::int64_t skip_;
  // Of the head being measured.
  std::vector<std::int32_t> positions_;
  std::vector<double> kept_;  // [group]
  std::vector<float> lse_;    // [group]
};

}  // namespace kvreplay::replay
