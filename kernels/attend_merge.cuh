// What follows the split kernels: the splits' sums become one, outputs are combined, raw scores
// become probabilities, and these, reduced over the query heads of the group, become mass and move
// the entries' scores. Every entry has one writer, so results do not depend on the schedule.
#pragma once

#include "kernels/attend_device.cuh"

namespace kvreplay::kernels::device {

inline constexpr int merge_entries = 512;  // entries of a block

// Combines the splits of query head `row`: returns the reference exponent and 1 / sum (0 if empty).
SIMT_DEVICE void merge_states(const attend_batch& a, const attend_head& h, int head, int row,
                              float& top, float& inverse) {
  top = h.sink == nullptr ? lowest : simt::greater_of(lowest, h.sink[row] * log2_e);
  for (int s = 0; s < a.splits; ++s) {
    top = simt::greater_of(top, a.partial_state[partial_row(a, head, s, row) * 2]);
  }
  float sum = h.sink == nullptr ? 0.0F : simt::exp2_fast(h.sink[row] * log2_e - top);
  for (int s = 0; s < a.splits; ++s) {
    const float* state = a.partial_state + partial_row(a, head, s, row) * 2;
    sum += state[1] * simt::exp2_fast(state[0] - top);
  }
  inverse = sum == 0 ? 0.0F : 1.0F / sum;
}

SIMT_DEVICE void combine_outputs(const attend_batch& a, const attend_head& h, int head,
                                 const float* states) {
  for (int i = static_cast<int>(simt::thread_index()); i < a.group * a.value_dim;
       i += attend_threads) {
    const int row = i / a.value_dim, c = i % a.value_dim;
    float out = 0;
    for (int s = 0; s < a.splits; ++s) {
      const std::int64_t at = partial_row(a, head, s, row);
      out += a.partial_o[at * a.value_dim + c] *
             simt::exp2_fast(a.partial_state[at * 2] - states[row * 2]);
    }
    h.o[i] = out * states[row * 2 + 1];
  }
  for (int row = static_cast<int>(simt::thread_index()); row < a.group; row += attend_threads) {
    const float inverse = states[row * 2 + 1];
    h.lse[row] = inverse == 0 ? simt::bits_float(0xff800000u)  // -inf
                              : states[row * 2] * ln_2 - simt::log_exact(inverse);
  }
}

// The first observation of an entry sets its score.
SIMT_DEVICE float updated_score(float score, float mass, score_rule rule, float decay) {
  if (rule == score_rule::last) return mass;
  if (rule == score_rule::sum) return (score < 0 ? 0.0F : score) + mass;
  return score < 0 ? mass : decay * score + (1 - decay) * mass;
}

// Mass that no score can take: the host's update_scores refuses the same.
SIMT_DEVICE bool is_bad_mass(float mass) { return !(mass >= 0 && mass <= 3.40282347e38F); }

// One entry's mass over the group; per_query_head also writes the rows.
SIMT_DEVICE float reduce_mass(const attend_batch& a, const attend_head& h, int head, int entry,
                              const float* states) {
  float sum = 0, most = 0;
  for (int row = 0; row < a.group; ++row) {
    const float p =
        simt::exp2_fast(score_row(a, head, row)[entry] - states[row * 2]) * states[row * 2 + 1];
    if (a.reduce == mass_layout::per_query_head && h.mass != nullptr) {
      h.mass[row * a.mass_stride + entry] = p;
    }
    sum += p;
    most = p > most ? p : most;
  }
  if (a.reduce == mass_layout::max) return most;
  return a.reduce == mass_layout::mean ? sum / static_cast<float>(a.group) : sum;
}

// grid (ceil(most_entries / 512), heads), block 128
SIMT_KERNEL SIMT_BOUNDS(attend_threads, 8) attend_merge_kernel(attend_batch a) {
  SIMT_SHARED(float, states, largest_group * 2);
  const int head = static_cast<int>(simt::block_y());
  const attend_head h = a.heads[head];
  head_storage& storage = *h.storage;
  for (int row = static_cast<int>(simt::thread_index()); row < a.group; row += attend_threads) {
    float top, inverse;
    merge_states(a, h, head, row, top, inverse);
    states[row * 2] = top;
    states[row * 2 + 1] = inverse;
  }
  simt::sync_threads();
  if (simt::block_x() == 0) combine_outputs(a, h, head, states);
  if (a.reduce != mass_layout::none) {
    const int begin = static_cast<int>(simt::block_x()) * merge_entries;
    const int end = simt::lesser_of(begin + merge_entries, storage.body + storage.tail);
    for (int e = begin + static_cast<int>(simt::thread_index()); e < end; e += attend_threads) {
      const float mass = reduce_mass(a, h, head, e, states);
      if (h.mass != nullptr && a.reduce != mass_layout::per_query_head) h.mass[e] = mass;
      if (a.rule == score_rule::none) continue;
      if (is_bad_mass(mass)) simt::atomic_or(&storage.fault, fault_mass);
      float* score =
          e < storage.body ? storage.body_score + e : storage.tail_score + (e - storage.body);
      *score = updated_score(*score, mass, a.rule, a.decay);
    }
  }
}

}  // namespace kvreplay::kernels::device
