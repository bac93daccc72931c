#include "kernels/entry_rows.hpp"

#include <algorithm>
#include <cstddef>

#include "kernels/groups.hpp"

namespace kvreplay::kernels {
namespace {

// One kind (keys or values) of a head.
struct rows_view {
  const std::vector<half_bits>& half;
  const std::vector<float>& full;
  const std::vector<std::int8_t>& codes;
  const std::vector<half_bits>& scalars;  // per entry, or empty
  const std::vector<float>& channels;     // per channel, or empty: ones
  std::size_t dim;
};

void read_body(const rows_view& rows, std::size_t row, float* out) {
  const float scalar = rows.scalars.empty() ? 1.0F : half_to_float(rows.scalars[row]);
  for (std::size_t c = 0; c < rows.dim; ++c) {
    const float scale = rows.channels.empty() ? scalar : rows.channels[c] * scalar;
    out[c] = static_cast<float>(rows.codes[row * rows.dim + c]) * scale;
  }
}

void read_tail(const rows_view& rows, std::size_t row, float* out) {
  for (std::size_t c = 0; c < rows.dim; ++c) {
    const std::size_t at = row * rows.dim + c;
    out[c] = rows.full.empty() ? half_to_float(rows.half[at]) : rows.full[at];
  }
}

std::vector<float> read_rows(const kv_cache& cache, int layer, int kv_head, const rows_view& rows,
                             bool keys) {
  const head_store& store = cache.head(layer, kv_head);
  const int body = store.body_size();
  std::vector<float> out(static_cast<std::size_t>(store.size()) * rows.dim);
  const auto at = [&](int entry) {
    return out.data() + static_cast<std::size_t>(entry) * rows.dim;
  };
  if (is_grouped(cache.format()) && body > 0) {
    grouped_rows grouped;
    grouped.open(cache, layer, kv_head);
    for (int e = 0; e < body; e += grouped_rows::most_rows) {
      const int count = std::min(grouped_rows::most_rows, body - e);
      keys ? grouped.keys(e, count, at(e)) : grouped.values(e, count, at(e));
    }
  } else {
    const row_pages pages = cache.rows_of(layer, kv_head, tier::body);
    for (int e = 0; e < body; ++e) {
      read_body(rows, static_cast<std::size_t>(row_of(pages, e)), at(e));
    }
  }
  const row_pages pages = cache.rows_of(layer, kv_head, tier::tail);
  for (int e = 0; e < store.tail_size(); ++e) {
    read_tail(rows, static_cast<std::size_t>(row_of(pages, e)), at(body + e));
  }
  return out;
}

}  // namespace

std::vector<float> entry_keys(const kv_cache& cache, int layer, int kv_head) {
  const payload_rows& p = cache.payload(layer, kv_head);
  return read_rows(
      cache, layer, kv_head,
      {p.tail_k, p.tail_k32, p.body_k, p.body_k_scale, cache.head(layer, kv_head).k_channel_scale,
       static_cast<std::size_t>(cache.shape().head_dim)},
      true);
}

std::vector<float> entry_values(const kv_cache& cache, int layer, int kv_head) {
  const payload_rows& p = cache.payload(layer, kv_head);
  return read_rows(
      cache, layer, kv_head,
      {p.tail_v, p.tail_v32, p.body_v, p.body_v_scale, cache.head(layer, kv_head).v_channel_scale,
       static_cast<std::size_t>(cache.shape().value_dim)},
      false);
}

}  // namespace kvreplay::kernels
