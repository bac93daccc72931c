#include "kernels/payload.hpp"

#include <algorithm>

#include "kernels/groups.hpp"
#include "kernels/inner_loops.hpp"
#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

row_widths::row_widths(const cache_shape& shape, const storage_format& format) {
  const bool half = format.tail == tail_format::fp16;
  (half ? tail_k : tail_k32) = shape.head_dim;
  (half ? tail_v : tail_v32) = shape.value_dim;
  if (format.body == body_format::none) return;
  body_k = code_bytes(format, shape.head_dim);
  body_v = code_bytes(format, shape.value_dim);
  if (format.body == body_format::int4) {
    body_v_scale = body_v_zero = (shape.value_dim + channel_block - 1) / channel_block;
  } else if (format.scales == scale_format::hybrid || format.scales == scale_format::token) {
    body_k_scale = body_v_scale = 1;
  }
}

std::int64_t row_widths::bytes(tier t) const {
  std::int64_t sum = 0;
  const payload_rows none;
  for_each_array(none, *this, t, [&sum](const auto& array, std::int64_t width) {
    sum += width * static_cast<std::int64_t>(sizeof(array[0]));
  });
  return sum;
}

void resize_rows(payload_rows& rows, const row_widths& widths, tier t, std::int64_t n) {
  for_each_array(rows, widths, t, [n](auto& array, std::int64_t width) {
    array.resize(static_cast<std::size_t>(n * width));
  });
}

void copy_row(payload_rows& rows, const row_widths& widths, tier t, std::int64_t from,
              std::int64_t to) {
  for_each_array(rows, widths, t, [from, to](auto& array, std::int64_t width) {
    std::copy_n(array.begin() + from * width, width, array.begin() + to * width);
  });
}

std::int32_t page_pool::take(const row_widths& widths, tier t, int page_size) {
  pages& p = of(t);
  if (!p.free.empty()) {
    const std::int32_t page = p.free.back();
    p.free.pop_back();
    return page;
  }
  resize_rows(rows, widths, t, (std::int64_t{p.made} + 1) * page_size);
  return p.made++;
}

}  // namespace kvreplay::kernels
