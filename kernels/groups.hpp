// groups: body formats whose scales belong to groups of entries.
//   int8, scales=group: groups of 64 in order of ageing; one FP16 scale per group and channel, K
//   and
//     V apart. x ~ scale * code, codes in [-127, 127].
//   int4 (KIVI, arXiv 2402.02750, section 3): keys by groups of 32 entries and channel, values by
//     entry and 32 channels; an FP16 scale and an FP16 zero point each. x ~ zero + scale * code,
//     codes in 0 .. 15, two to a byte: of every 32 channels, byte i holds channel i in its low half
//     and channel 16 + i in its high half; of n < 32 last channels, i and (n + 1) / 2 + i.
// An entry keeps its group for good; a group whose members have all left is forgotten.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

struct inner_loops;

bool is_grouped(const storage_format& format);
int group_size(const storage_format& format);           // entries that are quantised together
int code_bytes(const storage_format& format, int dim);  // of one row

// Quantises `group_size` rows into the body slots first .. first + size - 1, for which there is
// room, as a new group. False where a row is beyond the reach of float16 scales.
//   k [size, head_dim], v [size, value_dim], finite
bool write_group(kv_cache& cache, int layer, int head, std::int64_t first, const float* k,
                 const float* v);

// Forgets groups without members and numbers the others anew.
void forget_empty_groups(kv_cache& cache, int layer, int head);

// A body's entries as numbers, a few rows at a time. Holds the scales as floats; valid until the
// cache changes.
class grouped_rows {
 public:
  static constexpr int most_rows = 32;
  void open(const kv_cache& cache, int layer, int head);
  // Body slots begin .. begin + count - 1, at most most_rows of them: out [count, head_dim] or
  // [count, value_dim].
  void keys(std::int64_t begin, int count, float* out);
  void values(std::int64_t begin, int count, float* out);

 private:
  void numbers(bool keys, std::int64_t begin, int count, float* out);
  void open_block(std::int64_t begin, int count);

  const inner_loops* loops_ = nullptr;
  const payload_rows* rows_ = nullptr;
  const head_store* store_ = nullptr;
  row_pages pages_;
  int head_dim_ = 0, value_dim_ = 0;
  bool int4_ = false;
  std::vector<float> k_scale_, k_zero_, v_scale_;  // [groups, dim]
  std::vector<float> row_scale_, row_zero_;        // [count, blocks of channels]: of int4's values
};

}  // namespace kvreplay::kernels
