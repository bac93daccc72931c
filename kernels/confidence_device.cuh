// The numbers of confidence.hpp from logit rows on the device: several blocks read a row once, a
// second kernel merges their states.
//
// State over tokens seen: top, Z = sum e^d, T = sum d e^d with d = x - top <= 0, the second largest
// logit, the id of the largest. H = ln Z - T / Z; all terms of T are <= 0, so a common offset of
// the logits costs nothing. When top rises by D, T becomes e^-D (T - D Z) and Z becomes e^-D Z.
#pragma once

#include "kernels/device_storage.cuh"

namespace kvreplay::kernels::device {

inline constexpr int confidence_threads = 256;
inline constexpr int most_confidence_blocks = 32;

struct logit_state {
  float top, z, t, second;
  int id, bad;
};

struct logit_row {  // what is written; the fields of kernels::logit_summary
  float entropy, margin, top, lse;
  int argmax;  // -1: no token is possible
  int bad;     // logits that are NaN or +inf: the row must not be used
};

struct confidence_batch {
  const float* logits = nullptr;  // [rows, stride]
  std::int64_t stride = 0;
  int rows = 0, vocab_size = 0;
  int blocks = 8;                  // of a row, 1..32
  logit_state* partial = nullptr;  // [rows, blocks]
  logit_row* out = nullptr;        // [rows]
};

SIMT_DEVICE logit_state empty_logits() { return {lowest, 0, 0, lowest, -1, 0}; }

SIMT_DEVICE void raise_top(logit_state& s, float top) {
  const float d = s.top - top;  // <= 0; -200 is beyond every exponential that matters
  const float bounded = d < -200.0F ? -200.0F : d;
  const float factor = simt::exp2_fast(bounded * log2_e);
  s.t = factor * (s.t + bounded * s.z);
  s.z *= factor;
  s.top = top;
}

SIMT_DEVICE void merge_logits(logit_state& s, logit_state o) {
  const bool other_first =
      o.id >= 0 && (s.id < 0 || o.top > s.top || (o.top == s.top && o.id < s.id));
  const float beaten = other_first ? s.top : o.top;
  s.second = simt::greater_of(simt::greater_of(s.second, o.second), beaten);
  const float top = simt::greater_of(s.top, o.top);
  if (other_first) s.id = o.id;
  raise_top(s, top);
  raise_top(o, top);
  s.z += o.z;
  s.t += o.t;
  s.bad += o.bad;
}

// Four tokens: one comparison with the running maxima, one rescaling at most.
//   x[i] of token first + i * confidence_threads
SIMT_DEVICE void add_logits(logit_state& s, float (&x)[4], int first) {
  float most = lowest;
  SIMT_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (!(x[i] <= 3.4028235e38F)) {  // NaN or +inf
      ++s.bad;
      x[i] = lowest;
    }
    most = simt::greater_of(most, x[i]);
  }
  if (most > s.second) {
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (x[i] > s.top) {
        s.second = s.top;
        raise_top(s, x[i]);
        s.id = first + i * confidence_threads;
      } else if (x[i] > s.second) {
        s.second = x[i];
      }
    }
  }
  SIMT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float d = x[i] - s.top;
    const float bounded = d < -200.0F ? -200.0F : d;
    const float e = x[i] <= lowest ? 0.0F : simt::exp2_fast(bounded * log2_e);
    s.z += e;
    s.t += bounded * e;
  }
}

SIMT_DEVICE logit_state merge_warp(logit_state s) {
  SIMT_UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) {
    logit_state o;
    o.top = simt::shuffle_xor(s.top, mask);
    o.z = simt::shuffle_xor(s.z, mask);
    o.t = simt::shuffle_xor(s.t, mask);
    o.second = simt::shuffle_xor(s.second, mask);
    o.id = simt::shuffle_xor(s.id, mask);
    o.bad = simt::shuffle_xor(s.bad, mask);
    merge_logits(s, o);
  }
  return s;
}

// grid (blocks, rows), block 256
SIMT_KERNEL SIMT_BOUNDS(confidence_threads, 4) confidence_kernel(confidence_batch a) {
  SIMT_SHARED(logit_state, states, confidence_threads / simt::warp_size);
  constexpr int piece = 4 * confidence_threads;
  const float* row = a.logits + a.stride * static_cast<std::int64_t>(simt::block_y());
  const int pieces = (a.vocab_size + piece - 1) / piece;
  const int per = (pieces + a.blocks - 1) / a.blocks * piece;
  const int begin = static_cast<int>(simt::block_x()) * per;
  const int end = simt::lesser_of(begin + per, a.vocab_size);
  logit_state s = empty_logits();
  for (int base = begin; base < end; base += piece) {
    float x[4];
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int token = base + i * confidence_threads + thread();
      x[i] = token < end ? row[token] : lowest;
    }
    add_logits(s, x, base + thread());
  }
  s = merge_warp(s);
  if (lane_of_warp() == 0) states[warp_of_block()] = s;
  simt::sync_threads();
  if (thread() != 0) return;
  for (int w = 1; w < confidence_threads / simt::warp_size; ++w) merge_logits(s, states[w]);
  a.partial[simt::block_y() * static_cast<unsigned>(a.blocks) + simt::block_x()] = s;
}

// grid (rows), block 32
SIMT_KERNEL SIMT_BOUNDS(simt::warp_size, 8) confidence_merge_kernel(confidence_batch a) {
  const int row = static_cast<int>(simt::block_x());
  logit_state s = thread() < a.blocks ? a.partial[row * a.blocks + thread()] : empty_logits();
  s = merge_warp(s);
  if (thread() != 0) return;
  const float infinity = simt::bits_float(0x7f800000u);
  logit_row out = {0, 0, 0, -infinity, s.id, s.bad};
  if (s.id >= 0) {
    const float log_z = simt::log_exact(s.z), entropy = log_z - s.t / s.z;
    out.entropy = entropy > 0 ? entropy : 0.0F;
    out.margin = s.second <= lowest ? infinity : s.top - s.second;
    out.top = 1.0F / s.z;
    out.lse = s.top + log_z;
  }
  a.out[row] = out;
}

inline void launch_confidence(const confidence_batch& a, simt::stream_type stream) {
  if (a.logits == nullptr || a.partial == nullptr || a.out == nullptr) {
    refuse("confidence", "a pointer of the batch is null");
  }
  if (a.rows < 1 || a.rows > 65535 || a.vocab_size < 1 || a.stride < a.vocab_size) {
    refuse("confidence", "rows, vocab_size or stride is out of range");
  }
  if (a.blocks < 1 || a.blocks > most_confidence_blocks) {
    refuse("confidence", "blocks is not in 1..32");
  }
  const auto rows = static_cast<unsigned>(a.rows);
  simt::launch(confidence_kernel, {static_cast<unsigned>(a.blocks), rows}, confidence_threads, a,
               stream);
  simt::launch(confidence_merge_kernel, {rows}, simt::warp_size, a, stream);
}

}  // namespace kvreplay::kernels::device
