#include "kernels/groups.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/inner_loops.hpp"
#include "kernels/numerics.hpp"
#include "kernels/quantise.hpp"

namespace kvreplay::kernels {
namespace {

constexpr float largest_code4 = 15.0F;
constexpr half_bits smallest_scale = 0x0400;  // 2^-14, the smallest normal value

// The largest FP16 value that is not above x; not finite where there is none.
half_bits half_at_most(float x) {
  half_bits h = float_to_half(x);
  if (half_to_float(h) <= x) return h;
  // One step down: bits of positive values fall, those of negative ones rise with magnitude.
  return static_cast<half_bits>((h & 0x8000u) != 0 ? h + 1 : h - 1);
}

// The FP16 step whose fifteenth multiple reaches `range`: at least 2^-14, rounded up.
half_bits step_over(float range) {
  half_bits h = float_to_half(range / largest_code4);
  if (15.0 * static_cast<double>(half_to_float(h)) < static_cast<double>(range)) ++h;
  return std::max(h, smallest_scale);
}

struct affine {
  half_bits scale, zero;
  bool finite() const { return is_finite_half(scale) && is_finite_half(zero); }
  std::int8_t code(float x) const {
    const float steps = (x - half_to_float(zero)) / half_to_float(scale);
    return static_cast<std::int8_t>(round_even(std::clamp(steps, 0.0F, largest_code4)));
  }
};

affine affine_over(float least, float most) {
  const half_bits zero = half_at_most(least);
  return {step_over(most - half_to_float(zero)), zero};
}

// Writes codes [dim] of 0 .. 15 as a packed row.
void pack(const std::int8_t* codes, int dim, std::int8_t* row) {
  for (int begin = 0; begin < dim; begin += channel_block, row += channel_block / 2) {
    const int channels = std::min(channel_block, dim - begin), half = (channels + 1) / 2;
    for (int i = 0; i < half; ++i) {
      const int high = half + i < channels ? codes[begin + half + i] : 0;
      row[i] = static_cast<std::int8_t>(codes[begin + i] | high << 4);
    }
  }
}

// One kind (K or V) of a new group: `rows` rows of `dim` channels that go to body slots from
// `first` on.
struct group_part {
  const float* x;  // [rows, dim]
  int rows, dim;
  std::vector<std::int8_t>& codes;
  row_pages pages;
  std::int64_t first;
  std::int8_t* row(int r, int width) const {
    return codes.data() + row_of(pages, first + r) * width;
  }
};

// Appends dim scales of a group; false where one is not finite.
bool quantise8(const group_part& part, std::vector<half_bits>& scales) {
  for (int c = 0; c < part.dim; ++c) {
    float largest = 0;
    for (int r = 0; r < part.rows; ++r) {
      largest = std::max(largest, std::fabs(part.x[std::int64_t{r} * part.dim + c]));
    }
    const half_bits scale = token_scale(largest);
    if (!is_finite_half(scale)) return false;
    scales.push_back(scale);
    const float step = half_to_float(scale);
    for (int r = 0; r < part.rows; ++r) {
      const float quotient = part.x[std::int64_t{r} * part.dim + c] / step;
      part.row(r, part.dim)[c] = static_cast<std::int8_t>(round_even(quotient));
    }
  }
  return true;
}

bool quantise_keys4(const group_part& part, std::vector<half_bits>& scales,
                    std::vector<half_bits>& zeros) {
  const int dim = part.dim;
  std::vector<std::int8_t> codes(static_cast<std::size_t>(part.rows) *
                                 static_cast<std::size_t>(dim));
  for (int c = 0; c < dim; ++c) {
    float least = part.x[c], most = part.x[c];
    for (int r = 1; r < part.rows; ++r) {
      least = std::min(least, part.x[std::int64_t{r} * dim + c]);
      most = std::max(most, part.x[std::int64_t{r} * dim + c]);
    }
    const affine a = affine_over(least, most);
    if (!a.finite()) return false;
    scales.push_back(a.scale);
    zeros.push_back(a.zero);
    for (int r = 0; r < part.rows; ++r) {
      const std::int64_t at = std::int64_t{r} * dim + c;
      codes[static_cast<std::size_t>(at)] = a.code(part.x[at]);
    }
  }
  for (int r = 0; r < part.rows; ++r) {
    pack(codes.data() + std::int64_t{r} * dim, dim, part.row(r, (dim + 1) / 2));
  }
  return true;
}

// Scale and zero point of row r's channels b * 32 .. go to scales and zeros [slots, blocks].
bool quantise_values4(const group_part& part, std::vector<half_bits>& scales,
                      std::vector<half_bits>& zeros) {
  const int dim = part.dim, blocks = (dim + channel_block - 1) / channel_block;
  std::vector<std::int8_t> codes(static_cast<std::size_t>(dim));
  for (int r = 0; r < part.rows; ++r) {
    const float* x = part.x + std::int64_t{r} * dim;
    for (int b = 0; b < blocks; ++b) {
      const int begin = b * channel_block, end = std::min(dim, begin + channel_block);
      const auto [least, most] = std::minmax_element(x + begin, x + end);
      const affine a = affine_over(*least, *most);
      if (!a.finite()) return false;
      const auto at = static_cast<std::size_t>(row_of(part.pages, part.first + r) * blocks + b);
      scales[at] = a.scale;
      zeros[at] = a.zero;
      for (int c = begin; c < end; ++c) codes[static_cast<std::size_t>(c)] = a.code(x[c]);
    }
    pack(codes.data(), dim, part.row(r, (dim + 1) / 2));
  }
  return true;
}

void to_floats(const std::vector<half_bits>& halves, std::vector<float>& out) {
  out.resize(halves.size());
  active_loops().from_halves(halves.data(), static_cast<std::int64_t>(halves.size()), out.data());
}

// Rows `keep` of a table [rows, dim] move up in order.
void keep_rows(std::vector<half_bits>& table, const std::vector<std::int32_t>& number,
               std::int32_t kept) {
  if (table.empty()) return;
  const auto dim = static_cast<std::int64_t>(table.size() / number.size());
  for (std::size_t g = 0; g < number.size(); ++g) {
    if (number[g] < 0) continue;
    std::copy_n(table.begin() + static_cast<std::int64_t>(g) * dim, dim,
                table.begin() + std::int64_t{number[g]} * dim);
  }
  table.resize(static_cast<std::size_t>(kept * dim));
}

}  // namespace

bool is_grouped(const storage_format& f) {
  return f.body == body_format::int4 ||
         (f.body == body_format::int8 && f.scales == scale_format::group);
}

int group_size(const storage_format& f) { return f.body == body_format::int4 ? 32 : 64; }

int code_bytes(const storage_format& f, int dim) {
  return f.body == body_format::int4 ? (dim + 1) / 2 : dim;
}

bool write_group(kv_cache& cache, int layer, int head, std::int64_t first, const float* k,
                 const float* v) {
  head_store& store = cache.head(layer, head);
  payload_rows& rows = cache.payload(layer, head);
  const row_pages pages = cache.rows_of(layer, head, tier::body);
  const int size = group_size(cache.format());
  const group_part keys = {k, size, cache.shape().head_dim, rows.body_k, pages, first};
  const group_part values = {v, size, cache.shape().value_dim, rows.body_v, pages, first};
  const auto number = static_cast<std::int32_t>(store.groups);
  const bool done =
      cache.format().body == body_format::int4
          ? quantise_keys4(keys, store.group_k_scale, store.group_k_zero) &&
                quantise_values4(values, rows.body_v_scale, rows.body_v_zero)
          : quantise8(keys, store.group_k_scale) && quantise8(values, store.group_v_scale);
  if (!done) return false;
  store.body_group.resize(static_cast<std::size_t>(first + size), number);
  ++store.groups;
  return true;
}

void forget_empty_groups(kv_cache& cache, int layer, int head) {
  head_store& store = cache.head(layer, head);
  std::vector<std::int32_t> number(static_cast<std::size_t>(store.groups), -1);
  for (const std::int32_t g : store.body_group) number[static_cast<std::size_t>(g)] = 0;
  std::int32_t kept = 0;
  for (std::int32_t& n : number) n = n < 0 ? n : kept++;
  if (kept == store.groups) return;
  for (std::int32_t& g : store.body_group) g = number[static_cast<std::size_t>(g)];
  keep_rows(store.group_k_scale, number, kept);
  keep_rows(store.group_k_zero, number, kept);
  keep_rows(store.group_v_scale, number, kept);
  store.groups = kept;
}

void grouped_rows::open(const kv_cache& cache, int layer, int head) {
  loops_ = &active_loops();
  store_ = &cache.head(layer, head);
  rows_ = &cache.payload(layer, head);
  pages_ = cache.rows_of(layer, head, tier::body);
  head_dim_ = cache.shape().head_dim;
  value_dim_ = cache.shape().value_dim;
  int4_ = cache.format().body == body_format::int4;
  to_floats(store_->group_k_scale, k_scale_);
  to_floats(store_->group_k_zero, k_zero_);
  to_floats(store_->group_v_scale, v_scale_);
}

// The scales and zero points of int4's values, side by side as floats.
void grouped_rows::open_block(std::int64_t begin, int count) {
  const int blocks = (value_dim_ + channel_block - 1) / channel_block;
  row_scale_.resize(static_cast<std::size_t>(count * blocks));
  row_zero_.resize(row_scale_.size());
  for (std::int64_t i = 0; i < count;) {
    const std::int64_t run = rows_together(pages_, begin + i, count - i);
    const std::int64_t from = row_of(pages_, begin + i) * blocks, to = i * blocks;
    loops_->from_halves(rows_->body_v_scale.data() + from, run * blocks, row_scale_.data() + to);
    loops_->from_halves(rows_->body_v_zero.data() + from, run * blocks, row_zero_.data() + to);
    i += run;
  }
}

void grouped_rows::numbers(bool keys, std::int64_t begin, int count, float* out) {
  const int dim = keys ? head_dim_ : value_dim_;
  const int width = int4_ ? (dim + 1) / 2 : dim;
  const int blocks = (dim + channel_block - 1) / channel_block;
  const bool per_block = int4_ && !keys;
  const std::int8_t* codes = (keys ? rows_->body_k : rows_->body_v).data();
  const float* scales = (keys ? k_scale_ : v_scale_).data();
  const std::int8_t* rows[most_rows];
  const float *scale[most_rows], *zero[most_rows];
  for (int r = 0; r < count; ++r) {
    rows[r] = codes + row_of(pages_, begin + r) * width;
    const std::int64_t table =
        std::int64_t{store_->body_group[static_cast<std::size_t>(begin + r)]} * dim;
    scale[r] = per_block ? row_scale_.data() + std::int64_t{r} * blocks : scales + table;
    zero[r] = per_block ? row_zero_.data() + std::int64_t{r} * blocks
              : int4_   ? k_zero_.data() + table
                        : nullptr;
  }
  const code_job job = {rows, scale, zero, count, dim, per_block, out};
  int4_ ? loops_->numbers4(job) : loops_->numbers8(job);
}

void grouped_rows::keys(std::int64_t begin, int count, float* out) {
  numbers(true, begin, count, out);
}

void grouped_rows::values(std::int64_t begin, int count, float* out) {
  if (int4_) open_block(begin, count);
  numbers(false, begin, count, out);
}

}  // namespace kvreplay::kernels
