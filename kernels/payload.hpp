// payload: the arrays that hold keys and values, and the pages that a layer's heads share in the
// paged layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/half.hpp"
#include "kernels/row_pages.hpp"

namespace kvreplay::kernels {

struct cache_shape;
struct storage_format;

// high precision (tail) and low precision (body)
enum class tier : std::uint8_t { tail, body };

// Rows of one KV head (contiguous layout), or of all KV heads of a layer (paged). Arrays that the
// format does not have stay empty.
struct payload_rows {
  // Tail: [rows][head_dim] and [rows][value_dim]; FP16 bits, or FP32 in tail_format::fp32.
  std::vector<half_bits> tail_k, tail_v;
  std::vector<float> tail_k32, tail_v32;
  // Body: codes [rows][head_dim], [rows][value_dim] (int4: two to a byte, groups.hpp); one FP16
  // scalar per entry for K, V (int4: for V a scale and a zero point per 32 channels).
  std::vector<std::int8_t> body_k, body_v;
  std::vector<half_bits> body_k_scale, body_v_scale, body_v_zero;
};

// Values per row of each array of payload_rows; 0: the format has no such array.
struct row_widths {
  int tail_k = 0, tail_v = 0, tail_k32 = 0, tail_v32 = 0;
  int body_k = 0, body_v = 0, body_k_scale = 0, body_v_scale = 0, body_v_zero = 0;

  row_widths() = default;
  row_widths(const cache_shape&, const storage_format&);
  std::int64_t bytes(tier t) const;  // of one row
};

// Calls visit(array, values per row) for the arrays of a tier that the format has.
template <class Rows, class Visit>
void for_each_array(Rows& rows, const row_widths& widths, tier t, Visit&& visit) {
  const auto see = [&visit](auto& array, int width) {
    if (width > 0) visit(array, static_cast<std::int64_t>(width));
  };
  if (t == tier::tail) {
    see(rows.tail_k, widths.tail_k);
    see(rows.tail_v, widths.tail_v);
    see(rows.tail_k32, widths.tail_k32);
    see(rows.tail_v32, widths.tail_v32);
  } else {
    see(rows.body_k, widths.body_k);
    see(rows.body_v, widths.body_v);
    see(rows.body_k_scale, widths.body_k_scale);
    see(rows.body_v_scale, widths.body_v_scale);
    see(rows.body_v_zero, widths.body_v_zero);
  }
}

// Calls visit(array) for all arrays, in one order.
template <class Visit>
void for_each_state(payload_rows& rows, Visit&& visit) {
  visit(rows.tail_k);
  visit(rows.tail_v);
  visit(rows.tail_k32);
  visit(rows.tail_v32);
  visit(rows.body_k);
  visit(rows.body_v);
  visit(rows.body_k_scale);
  visit(rows.body_v_scale);
  visit(rows.body_v_zero);
}

void resize_rows(payload_rows&, const row_widths&, tier, std::int64_t rows);
void copy_row(payload_rows&, const row_widths&, tier, std::int64_t from, std::int64_t to);

// The pages of one layer. Heads take pages for either tier as they grow and give empty ones back;
// what was given back is taken first, the last one first. A page's content is what its last owner
// left there.
class page_pool {
 public:
  payload_rows rows;

  std::int32_t take(const row_widths&, tier, int page_size);
  void give_back(tier t, std::int32_t page) { of(t).free.push_back(page); }
  const std::vector<std::int32_t>& free_pages(tier t) const {
    return t == tier::tail ? tail_.free : body_.free;
  }
  template <class Visit>
  void for_each_state(Visit&& visit) {
    kernels::for_each_state(rows, visit);
    for (pages* p : {&tail_, &body_}) {
      visit(p->free);
      visit(p->made);
    }
  }

 private:
  struct pages {
    std::vector<std::int32_t> free;
    std::int32_t made = 0;
  };
  pages& of(tier t) { return t == tier::tail ? tail_ : body_; }
  pages tail_, body_;
};

}  // namespace kvreplay::kernels
