#include "kernels/quantise.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string_view>

#include "kernels/groups.hpp"
#include "kernels/inner_loops.hpp"
#include "kernels/numerics.hpp"
#include "kernels/select.hpp"

namespace kvreplay::kernels {
namespace {

constexpr std::int64_t least_calibration_rows = 64;
constexpr float largest_code = 127.0F;
constexpr half_bits smallest_token_scale = 0x0400;  // 2^-14: the smallest normal value

bool per_token(scale_format s) { return s == scale_format::hybrid || s == scale_format::token; }

std::int8_t to_code(float quotient) {
  const float bounded = std::min(std::max(quotient, -largest_code), largest_code);
  return static_cast<std::int8_t>(round_even(bounded));
}

// The largest magnitude of every channel, or of every rotary pair of keys (its Euclidean norm,
// which the rotation leaves alone), over the rows seen.
class channel_range {
 public:
  channel_range(int dim, rope_pairing pairing, int rotated)
      : dim_(dim), pairing_(pairing), rotated_(rotated), top_(static_cast<std::size_t>(dim)) {}

  void add(const float* x) {
    const int half = rotated_ / 2;
    const int paired = pairing_ == rope_pairing::none ? 0 : rotated_;
    for (int p = 0; p < paired / 2; ++p) {
      const int a = pairing_ == rope_pairing::half ? p : 2 * p;
      const int b = pairing_ == rope_pairing::half ? p + half : 2 * p + 1;
      const double xa = static_cast<double>(x[a]), xb = static_cast<double>(x[b]);
      const auto norm = static_cast<float>(std::sqrt(xa * xa + xb * xb));
      raise(a, norm);
      raise(b, norm);
    }
    for (int c = paired; c < dim_; ++c) raise(c, std::fabs(x[c]));
  }

  const std::vector<float>& top() const { return top_; }

 private:
  void raise(int c, float value) {
    float& t = top_[static_cast<std::size_t>(c)];
    t = t < value ? value : t;
  }
  int dim_;
  rope_pairing pairing_;
  int rotated_;
  std::vector<float> top_;
};

channel_range key_range(const kv_cache& cache) {
  const cache_shape& shape = cache.shape();
  const bool pairs = cache.format().scales == scale_format::hybrid;
  return {shape.head_dim, pairs ? shape.rope : rope_pairing::none,
          shape.rope_dim == 0 ? shape.head_dim : shape.rope_dim};
}

channel_range value_range(const kv_cache& cache) {
  return {cache.shape().value_dim, rope_pairing::none, 0};
}

// A scale whose 127 steps reach `magnitude`: rounded up, so that it does not clip what it covers.
float reaching(float magnitude) {
  const float scale = magnitude / largest_code;
  const bool short_of = static_cast<double>(scale) * 127.0 < static_cast<double>(magnitude);
  return short_of ? std::nextafter(scale, INFINITY) : scale;
}

std::vector<float> channel_scales(const std::vector<float>& top, const storage_format& format) {
  std::vector<float> scales = top;
  if (format.scales != scale_format::hybrid) {
    const float margin =
        format.scales == scale_format::channel_static ? format.static_margin : 1.0F;
    for (float& s : scales) s = reaching(s * margin);
    return scales;
  }
  const float largest = *std::max_element(top.begin(), top.end());
  for (float& s : scales) s = largest == 0 ? 1.0F : std::max(s, 0x1p-12F * largest);
  return scales;
}

void check_finite(const float* row, int n, int layer, int head, std::int64_t position,
                  std::string_view what) {
  std::uint32_t bad = 0;
  for (int c = 0; c < n; ++c) bad |= is_not_finite(row[c]);
  if (bad == 0) return;
  const float* at = std::find_if(row, row + n, [](float x) { return is_not_finite(x) != 0; });
  throw std::domain_error(
      fmt::format("quantise: layer {}, head {}, position {}: {} channel {} is {}", layer, head,
                  position, what, at - row, *at));
}

// The tail's rows of one kind (K or V) of one head, as the loops below see them.
struct rows_view {
  const std::vector<half_bits>& half;
  const std::vector<float>& full;
  int dim;
  row_pages pages;
  void load(std::int64_t slot, std::vector<float>& out) const {
    out.resize(static_cast<std::size_t>(dim));
    const std::int64_t at = row_of(pages, slot) * dim;
    if (half.empty()) {
      std::copy_n(full.begin() + at, dim, out.begin());
      return;
    }
    active_loops().from_halves(half.data() + at, dim, out.data());
  }
};

rows_view tail_keys(const kv_cache& cache, int layer, int head) {
  const payload_rows& rows = cache.payload(layer, head);
  return {rows.tail_k, rows.tail_k32, cache.shape().head_dim,
          cache.rows_of(layer, head, tier::tail)};
}
rows_view tail_values(const kv_cache& cache, int layer, int head) {
  const payload_rows& rows = cache.payload(layer, head);
  return {rows.tail_v, rows.tail_v32, cache.shape().value_dim,
          cache.rows_of(layer, head, tier::tail)};
}

// First age-out of a short prompt: the tables come from all entries held.
void calibrate_on_held(kv_cache& cache, int layer, int head) {
  head_store& store = cache.head(layer, head);
  channel_range keys = key_range(cache), values = value_range(cache);
  const rows_view k = tail_keys(cache, layer, head), v = tail_values(cache, layer, head);
  std::vector<float> row;
  for (int slot = 0; slot < store.tail_size(); ++slot) {
    k.load(slot, row);
    keys.add(row.data());
    v.load(slot, row);
    values.add(row.data());
  }
  store.k_channel_scale = channel_scales(keys.top(), cache.format());
  store.v_channel_scale = channel_scales(values.top(), cache.format());
}

// Codes of a row under channel scales (null: ones) and its own scalar, which is returned.
//   x [n] is divided by the channel scales in place
half_bits quantise_token(float* x, int n, const float* channel, std::int8_t* codes) {
  if (channel != nullptr) {
    for (int c = 0; c < n; ++c) x[c] /= channel[c];
  }
  float largest = 0;
  for (int c = 0; c < n; ++c) largest = std::max(largest, std::fabs(x[c]));
  const half_bits scale = token_scale(largest);
  const float step = half_to_float(scale);
  for (int c = 0; c < n; ++c) codes[c] = to_code(x[c] / step);
  return scale;
}

// The codes of one kind (K or V) of one head, and the channel scales and scalars they go by.
struct code_rows {
  std::vector<std::int8_t>& codes;
  std::vector<half_bits>& scalars;
  std::vector<float>& channel;
  int dim;
  row_pages pages;
  std::int8_t* row(std::int64_t slot) { return codes.data() + row_of(pages, slot) * dim; }
  half_bits& scalar(std::int64_t slot) {
    return scalars[static_cast<std::size_t>(row_of(pages, slot))];
  }
};

// channel_grow: a value beyond channel c's scale raises it and rewrites the channel's codes in the
// first `slots` slots.
void grow_channel(float value, int c, code_rows& to, std::int64_t slots) {
  float& scale = to.channel[static_cast<std::size_t>(c)];
  const float grown =
      std::max(1.5F * (std::fabs(value) / largest_code), std::numeric_limits<float>::min());
  for (std::int64_t s = 0; s < slots; ++s) {
    std::int8_t& code = to.row(s)[c];
    code = to_code(static_cast<float>(code) * scale / grown);
  }
  scale = grown;
}

// Codes of the row of a slot that follows all others, under per-channel scales.
//   x [dim]
void quantise_channels(const float* x, code_rows& to, std::int64_t slot, bool grow,
                       storage_events& events) {
  std::int8_t* out = to.row(slot);
  for (int c = 0; c < to.dim; ++c) {
    const float& scale = to.channel[static_cast<std::size_t>(c)];
    const double reach = 127.0 * static_cast<double>(scale);
    if (std::fabs(static_cast<double>(x[c])) > reach) {
      if (grow) {
        grow_channel(x[c], c, to, slot);
        ++events.requantised;
      } else {
        ++events.clipped;
      }
    }
    // A channel that calibration saw as all zero has scale 0: what it clips becomes 0.
    out[c] = scale > 0 ? to_code(x[c] / scale) : std::int8_t{0};
  }
}

// Quantises one row of K or V into a body slot that follows all others. False where the row is too
// large for a float16 scalar.
bool write_codes(float* x, const storage_format& format, code_rows to, std::int64_t slot,
                 storage_events& events) {
  if (!per_token(format.scales)) {
    quantise_channels(x, to, slot, format.scales == scale_format::channel_grow, events);
    return true;
  }
  const float* channel = to.channel.empty() ? nullptr : to.channel.data();
  to.scalar(slot) = quantise_token(x, to.dim, channel, to.row(slot));
  return is_finite_half(to.scalar(slot));
}

// Slots of the tail whose time has come, oldest first.
std::vector<int> aged_slots(const head_store& store, const storage_format& format,
                            std::int32_t step) {
  const std::int64_t newest = std::int64_t{step} - format.tail_window;
  std::vector<int> slots;
  for (int i = 0; i < store.tail_size(); ++i) {
    const std::int32_t p = store.tail_position[static_cast<std::size_t>(i)];
    if (p <= newest && p >= format.tail_sinks) slots.push_back(i);
  }
  std::sort(slots.begin(), slots.end(), [&](int a, int b) {
    return store.tail_position[static_cast<std::size_t>(a)] <
           store.tail_position[static_cast<std::size_t>(b)];
  });
  return slots;
}

[[noreturn]] void refuse_row(int layer, int head, std::int32_t position, std::string_view what) {
  throw std::domain_error(
      fmt::format("quantise: layer {}, head {}, position {}: {}", layer, head, position, what));
}

// Codes of the given tail slots of one head, in body slots from `first` on, for which there is
// room.
void quantise_rows(kv_cache& cache, int layer, int head, const std::vector<int>& slots,
                   std::int64_t first) {
  head_store& store = cache.head(layer, head);
  const rows_view k = tail_keys(cache, layer, head), v = tail_values(cache, layer, head);
  payload_rows& rows = cache.payload(layer, head);
  const row_pages pages = cache.rows_of(layer, head, tier::body);
  const code_rows key_codes = {rows.body_k, rows.body_k_scale, store.k_channel_scale, k.dim, pages};
  const code_rows value_codes = {rows.body_v, rows.body_v_scale, store.v_channel_scale, v.dim,
                                 pages};
  storage_events& events = cache.events(layer);
  std::vector<float> key, value;
  for (const int slot : slots) {
    k.load(slot, key);
    v.load(slot, value);
    if (!write_codes(key.data(), cache.format(), key_codes, first, events) ||
        !write_codes(value.data(), cache.format(), value_codes, first, events)) {
      refuse_row(layer, head, store.tail_position[static_cast<std::size_t>(slot)],
                 "the row is too large for a float16 scalar over the calibrated channel scales");
    }
    ++first;
  }
}

// The same for formats with groups: whole groups of slots.
void quantise_groups(kv_cache& cache, int layer, int head, const std::vector<int>& slots,
                     std::int64_t first) {
  const rows_view k = tail_keys(cache, layer, head), v = tail_values(cache, layer, head);
  const auto size = static_cast<std::size_t>(group_size(cache.format()));
  std::vector<float> row, keys, values;
  for (std::size_t begin = 0; begin < slots.size(); begin += size) {
    keys.clear();
    values.clear();
    for (std::size_t i = begin; i < begin + size; ++i) {
      k.load(slots[i], row);
      keys.insert(keys.end(), row.begin(), row.end());
      v.load(slots[i], row);
      values.insert(values.end(), row.begin(), row.end());
    }
    const auto to = first + static_cast<std::int64_t>(begin);
    if (!write_group(cache, layer, head, to, keys.data(), values.data())) {
      const auto oldest = static_cast<std::size_t>(slots[begin]);
      refuse_row(layer, head, cache.head(layer, head).tail_position[oldest],
                 "a row of the group that starts here is too large for float16 scales");
    }
  }
}

// Moves the given tail slots of one head to the body.
void age_head(kv_cache& cache, int layer, int head, const std::vector<int>& slots) {
  head_store& store = cache.head(layer, head);
  const std::int64_t first = store.body_size();
  cache.resize_payload(layer, head, tier::body, first + static_cast<std::int64_t>(slots.size()));
  if (is_grouped(cache.format())) {
    quantise_groups(cache, layer, head, slots, first);
  } else {
    quantise_rows(cache, layer, head, slots, first);
  }
  std::vector<std::uint8_t> stays(static_cast<std::size_t>(store.tail_size()), 1);
  for (const int slot : slots) {
    const auto at = static_cast<std::size_t>(slot);
    store.body_position.push_back(store.tail_position[at]);
    store.body_score.push_back(store.tail_score[at]);
    stays[at] = 0;
  }
  cache.events(layer).quantised += static_cast<std::int64_t>(slots.size());
  // The body's new entries come before the tail in entry order, and all of them stay.
  stays.insert(stays.begin(), static_cast<std::size_t>(store.body_size()), 1);
  compact(cache, layer, head, stays);
}

// Tail rows are finite since append; this guards what is written once and never checked again.
void check_slots(const kv_cache& cache, int layer, int head, const std::vector<int>& slots) {
  const head_store& store = cache.head(layer, head);
  const rows_view k = tail_keys(cache, layer, head), v = tail_values(cache, layer, head);
  std::vector<float> row;
  for (const int slot : slots) {
    const std::int32_t position = store.tail_position[static_cast<std::size_t>(slot)];
    k.load(slot, row);
    check_finite(row.data(), k.dim, layer, head, position, "k");
    v.load(slot, row);
    check_finite(row.data(), v.dim, layer, head, position, "v");
  }
}

}  // namespace

half_bits token_scale(float absmax) {
  half_bits scale = float_to_half(absmax / largest_code);
  const double reach = 127.0 * static_cast<double>(half_to_float(scale));
  if (reach < static_cast<double>(absmax)) ++scale;
  return std::max(scale, smallest_token_scale);  // positive values order like their bits
}

void calibrate(kv_cache& cache, int layer, const float* k, const float* v, std::int64_t rows) {
  if (!has_channel_table(cache.format()) || rows < least_calibration_rows) return;
  if (k == nullptr || v == nullptr) throw std::invalid_argument("calibrate: no k or no v");
  const cache_shape& shape = cache.shape();
  for (int h = 0; h < shape.kv_heads; ++h) {
    head_store& store = cache.head(layer, h);
    if (store.body_size() > 0) {
      throw std::invalid_argument(
          fmt::format("calibrate: layer {}, head {}: {} entries are quantised already", layer, h,
                      store.body_size()));
    }
    channel_range keys = key_range(cache), values = value_range(cache);
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* key = k + row_offset(r, shape.kv_heads, h, shape.head_dim);
      const float* value = v + row_offset(r, shape.kv_heads, h, shape.value_dim);
      check_finite(key, shape.head_dim, layer, h, r, "k");
      check_finite(value, shape.value_dim, layer, h, r, "v");
      keys.add(key);
      values.add(value);
    }
    store.k_channel_scale = channel_scales(keys.top(), cache.format());
    store.v_channel_scale = channel_scales(values.top(), cache.format());
  }
}

void age(kv_cache& cache, int layer, std::int32_t step) {
  if (cache.format().body == body_format::none) return;
  for (int h = 0; h < cache.shape().kv_heads; ++h) {
    head_store& store = cache.head(layer, h);
    std::vector<int> slots = aged_slots(store, cache.format(), step);
    if (is_grouped(cache.format())) {  // the others wait in the tail until their group is full
      slots.resize(slots.size() -
                   slots.size() % static_cast<std::size_t>(group_size(cache.format())));
    }
    if (slots.empty()) continue;
    if (has_channel_table(cache.format()) && store.k_channel_scale.empty()) {
      std::vector<int> held(static_cast<std::size_t>(store.tail_size()));
      std::iota(held.begin(), held.end(), 0);
      check_slots(cache, layer, h, held);
      calibrate_on_held(cache, layer, h);
    }
    check_slots(cache, layer, h, slots);
    age_head(cache, layer, h, slots);
  }
}

}  // namespace kvreplay::kernels
