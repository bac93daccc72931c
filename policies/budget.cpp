#include "policies/budget.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "policies/params.hpp"

namespace kvreplay::policies {
namespace {

// a * b for non-negative numbers, INT64_MAX where that does not fit.
std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  return __builtin_mul_overflow(a, b, &out) ? INT64_MAX : out;
}

std::int64_t saturating_sum(std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  return __builtin_add_overflow(a, b, &out) ? INT64_MAX : out;
}

// Bytes of an entry that is the last of its group: its codes, and scales that nothing shares.
std::int64_t lone_entry_bytes(const precision_rule& precision, const model_dims& dims) {
  const std::int64_t k = dims.head_dim, v = dims.value_dim;
  if (precision.body == body_kind::int8) return (k + v) + 2 * (k + v);
  const std::int64_t value_groups = (v + 31) / 32;
  return (k + 1) / 2 + (v + 1) / 2 + 4 * value_groups + 4 * k;
}

// Bytes of one (layer, KV head) that holds n entries, scalars and channel tables included. The
// FP16 part is the newest W and the sinks that never age: the most that the format can store.
std::int64_t head_bytes(const precision_rule& precision, const model_dims& dims, std::int64_t n) {
  const std::int64_t channels = std::int64_t{dims.head_dim} + dims.value_dim;
  if (precision.body == body_kind::none) return saturating_product(n, 2 * channels);
  if (precision.body == body_kind::int4 || precision.scales == scale_kind::group) {
    return saturating_product(n, std::max(2 * channels, lone_entry_bytes(precision, dims)));
  }
  const std::int64_t wide =
      std::min<std::int64_t>(n, std::int64_t{precision.window} + std::int64_t{precision.sinks});
  const bool scalars = precision.scales != scale_kind::channel;  // one FP16 for K, one for V
  const bool tables = precision.scales != scale_kind::token;     // one FP32 per channel
  const std::int64_t body_entry = channels + (scalars ? 4 : 0);
  return saturating_sum(saturating_sum(saturating_product(wide, 2 * channels),
                                       saturating_product(n - wide, body_entry)),
                        tables ? 4 * channels : 0);
}

// Bytes of the recorded layers with `entries` in every (layer, KV head), at most its window.
std::int64_t cache_bytes(const precision_rule& precision, const model_dims& dims,
                         std::int64_t entries) {
  std::int64_t sum = 0;
  const auto add_layer = [&](int layer) {
    const int window = dims.window.empty() ? 0 : dims.window[static_cast<size_t>(layer)];
    const std::int64_t held = window > 0 ? std::min<std::int64_t>(entries, window) : entries;
    sum =
        saturating_sum(sum, saturating_product(dims.n_kv_heads, head_bytes(precision, dims, held)));
  };
  if (dims.recorded_layers.empty()) {
    for (int layer = 0; layer < dims.n_layers; ++layer) add_layer(layer);
  } else {
    for (const int layer : dims.recorded_layers) add_layer(layer);
  }
  return sum;
}

// The largest number of entries per head that fits; INT_MAX where windows bound everything.
std::int64_t entries_in_bytes(const amount& a, const char* key, const precision_rule& precision,
                              const model_dims& dims) {
  const auto limit = static_cast<std::int64_t>(a.value);
  std::int64_t fits = 0, beyond = std::int64_t{INT_MAX} + 1;
  while (beyond - fits > 1) {
    const std::int64_t middle = fits + (beyond - fits) / 2;
    (cache_bytes(precision, dims, middle) <= limit ? fits : beyond) = middle;
  }
  if (fits == 0) {
    throw spec_error(
        fmt::format("{}={}: less than one entry in every (layer, KV head), which takes {} bytes",
                    key, amount_text(a), cache_bytes(precision, dims, 1)));
  }
  return fits;
}

void check_dims(const model_dims& dims) {
  const bool shape =
      dims.n_layers >= 1 && dims.n_kv_heads >= 1 && dims.head_dim >= 1 && dims.value_dim >= 1;
  const bool windows =
      dims.window.empty() || dims.window.size() == static_cast<size_t>(dims.n_layers);
  const bool layers = std::all_of(dims.recorded_layers.begin(), dims.recorded_layers.end(),
                                  [&](int l) { return l >= 0 && l < dims.n_layers; });
  if (!shape || !windows || !layers) {
    throw std::invalid_argument(fmt::format(
        "budget_plan: {} layers, {} KV heads, dims {} and {}, {} windows, {} recorded layers: "
        "expected positive sizes, one window a layer or none, recorded layers of the model",
        dims.n_layers, dims.n_kv_heads, dims.head_dim, dims.value_dim, dims.window.size(),
        dims.recorded_layers.size()));
  }
}

// Takes `excess` entries one at a time from the layer that has most (ties: the deeper), all at
// once: everything above some level goes, then one more from the deepest layers at that level.
void level_down(std::vector<std::int64_t>& shares, std::int64_t excess) {
  const auto above = [&](std::int64_t level) {
    std::int64_t sum = 0;
    for (const std::int64_t s : shares) sum += std::max<std::int64_t>(0, s - level);
    return sum;
  };
  std::int64_t low = -1, high = *std::max_element(shares.begin(), shares.end());
  while (high - low > 1) {  // above(high) <= excess < above(low)
    const std::int64_t middle = low + (high - low) / 2;
    (above(middle) <= excess ? high : low) = middle;
  }
  std::int64_t rest = excess - above(high);
  for (size_t l = shares.size(); l-- > 0;) {
    if (shares[l] < high) continue;
    shares[l] = high;
    if (rest > 0) {
      --shares[l];
      --rest;
    }
  }
}

std::vector<int> as_ints(const std::vector<std::int64_t>& wide) {
  std::vector<int> out;
  out.reserve(wide.size());
  for (const std::int64_t s : wide) {
    out.push_back(static_cast<int>(std::min<std::int64_t>(s, INT_MAX)));
  }
  return out;
}

// PyramidKV's published code on `budget`: the smallest share is floor(B / beta), the largest what
// keeps their mean at B, the step between layers floor((largest - smallest) / (L - 1)).
std::vector<std::int64_t> floor_step_shares(int layers, double budget, double beta, int least) {
  const double smallest = std::floor(budget / beta);
  const double largest = 2 * budget - smallest;
  const double step = std::floor((largest - smallest) / (layers - 1));
  std::vector<std::int64_t> out;
  for (int l = 0; l < layers; ++l) {
    out.push_back(std::max(static_cast<std::int64_t>(largest - l * step), std::int64_t{least}));
  }
  return out;
}

// Whole numbers with sum `sum` nearest to `ideal`, by largest remainder (ties: lower layer).
std::vector<std::int64_t> largest_remainder(const std::vector<double>& ideal, std::int64_t sum) {
  std::vector<std::int64_t> out, remainder;
  for (const double x : ideal) {
    out.push_back(static_cast<std::int64_t>(std::floor(x)));
    // Nine digits: remainders that are equal on paper must tie in spite of rounding.
    remainder.push_back(std::llround((x - std::floor(x)) * 1e9));
  }
  std::vector<size_t> order(ideal.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return remainder[a] > remainder[b]; });
  const std::int64_t left = sum - std::accumulate(out.begin(), out.end(), std::int64_t{0});
  for (std::int64_t i = 0; i < left; ++i) ++out[order[static_cast<size_t>(i) % order.size()]];
  return out;
}

}  // namespace

std::vector<int> pyramid_shares(int layers, std::int64_t budget, const pyramid_rule& rule,
                                int least) {
  if (rule.window > 0) {
    const std::int64_t window = std::min<std::int64_t>(rule.window, budget);
    pyramid_rule rest = rule;
    rest.window = 0;
    std::vector<int> shares = pyramid_shares(
        layers, budget - window, rest, static_cast<int>(std::max<std::int64_t>(0, least - window)));
    for (int& share : shares)
      share = static_cast<int>(std::min<std::int64_t>(share + window, INT_MAX));
    return shares;
  }
  const double b = rule.total * static_cast<double>(budget);
  const double sum = std::floor(b * layers + 0.5);
  if (layers > 1 && !rule.exact) {
    return as_ints(floor_step_shares(layers, std::floor(b + 0.5), rule.beta, least));
  }
  if (sum < static_cast<double>(layers) * least) {
    throw spec_error(fmt::format(
        "pyramid: budget {} x total {} over {} layers gives {:.0f} entries, too few for the {} "
        "that every layer keeps (sinks + recent, at least 1)",
        budget, real_text(rule.total), layers, sum, least));
  }
  std::vector<double> ideal;
  for (int l = 0; l < layers; ++l) {
    const double depth = layers == 1 ? 0.5 : static_cast<double>(l) / (layers - 1);
    const double first = 2 - 1 / rule.beta, last = 1 / rule.beta;
    ideal.push_back(b * (first + (last - first) * depth));
  }
  std::vector<std::int64_t> shares = largest_remainder(ideal, static_cast<std::int64_t>(sum));
  std::int64_t excess = 0;
  for (std::int64_t& s : shares) {
    excess += std::max<std::int64_t>(0, least - s);
    s = std::max<std::int64_t>(s, least);
  }
  if (excess > 0) level_down(shares, excess);
  return as_ints(shares);
}

budget_plan::budget_plan(const policy& p, const model_dims& dims) : policy_(p), dims_(dims) {
  check_dims(dims);
  const division_rule& division = policy_.budget.division;
  const size_t heads = static_cast<size_t>(dims.n_layers) * static_cast<size_t>(dims.n_kv_heads);
  if (division.kind == division_kind::table && division.shares.size() != heads) {
    throw spec_error(fmt::format("{}: the table has {} heads, the model {} layers x {} KV heads",
                                 policy_.name, division.shares.size(), dims.n_layers,
                                 dims.n_kv_heads));
  }
  const budget_rule& rule = policy_.budget;
  if (!rule.gated) {
    single_ = resolve(rule.single, "budget");
    return;
  }
  high_ = resolve(rule.gate.high, "high");
  low_ = resolve(rule.gate.low, "low");
  const bool steady = high_.source.unit != amount_unit::percent;
  if (policy_.protect.hard_recent && steady && high_.entries < policy_.protect.recent) {
    throw spec_error(fmt::format(
        "{}: high={} is {} entries, fewer than recent={}, which is never evicted", policy_.name,
        amount_text(high_.source), high_.entries, policy_.protect.recent));
  }
  if (rule.pyramid.on && !high_.shares.empty() && !low_.shares.empty()) {
    middle_shares_ = pyramid_shares(dims_.n_layers, (high_.entries + low_.entries) / 2,
                                    rule.pyramid, std::max(1, fixed_protection()));
  }
}

// sinks + recent that do not follow the budget. h2o's recent does and bounds nothing.
int budget_plan::fixed_protection() const {
  const protection_rule& rule = policy_.protect;
  const std::int64_t sum = std::int64_t{rule.sinks} + (rule.heavy >= 0 ? 0 : rule.recent);
  return static_cast<int>(std::min<std::int64_t>(sum, INT_MAX));
}

budget_plan::level budget_plan::resolve(const amount& a, const char* key) const {
  level out{a, INT_MAX, {}};
  if (a.unit == amount_unit::everything || a.unit == amount_unit::percent) return out;
  out.entries = a.unit == amount_unit::bytes ? entries_in_bytes(a, key, policy_.precision, dims_)
                                             : static_cast<std::int64_t>(a.value);
  if (policy_.budget.pyramid.on) {
    out.shares = pyramid_shares(dims_.n_layers, out.entries, policy_.budget.pyramid,
                                std::max(1, fixed_protection()));
  }
  return out;
}

std::int64_t budget_plan::entries_at(const level& l, std::int64_t step) const {
  if (l.source.unit != amount_unit::percent) return l.entries;
  const double share = l.source.value / 100 * static_cast<double>(step + 1) + 0.5;
  const auto entries = static_cast<std::int64_t>(std::floor(share));
  return std::clamp<std::int64_t>(entries, 1, INT_MAX);
}

int budget_plan::layer_share(std::int64_t entries, const std::vector<int>& shares,
                             int layer) const {
  if (!policy_.budget.pyramid.on) return static_cast<int>(entries);
  if (!shares.empty()) return shares.at(static_cast<size_t>(layer));
  const int least = std::max(1, fixed_protection());
  return pyramid_shares(dims_.n_layers, entries, policy_.budget.pyramid, least)
      .at(static_cast<size_t>(layer));
}

int budget_plan::share_of(const level& l, std::int64_t step, int layer) const {
  return layer_share(entries_at(l, step), l.shares, layer);
}

int budget_plan::share(std::int64_t step, int layer, bool tight) const {
  const budget_rule& rule = policy_.budget;
  if (rule.division.total > 0) {
    const std::int64_t heads = std::int64_t{dims_.n_layers} * dims_.n_kv_heads;
    return static_cast<int>(std::clamp<std::int64_t>(rule.division.total / heads, 1, INT_MAX));
  }
  if (!rule.gated) {
    return rule.single.unit == amount_unit::everything ? INT_MAX : share_of(single_, step, layer);
  }
  if (rule.gate.gate != gate_signal::constant) return share_of(tight ? high_ : low_, step, layer);
  return layer_share((entries_at(high_, step) + entries_at(low_, step)) / 2, middle_shares_, layer);
}

// HeadKV: every head gives floor(F / beta) of what is not protected into a pool, of which it has
// the table's part (arXiv 2410.19258, section 3.3).
int budget_plan::head_share(int share, int layer, int kv_head) const {
  const division_rule& rule = policy_.budget.division;
  if (rule.kind != division_kind::table || share == INT_MAX) return share;
  const protection guarded = protect(share);
  const std::int64_t window =
      std::min<std::int64_t>(share, std::int64_t{guarded.sinks} + guarded.recent);
  const std::int64_t free = share - window;
  const double given = std::floor(static_cast<double>(free) / rule.beta);
  const double pool = given * dims_.n_layers * dims_.n_kv_heads;
  const size_t head = static_cast<size_t>(layer) * static_cast<size_t>(dims_.n_kv_heads) +
                      static_cast<size_t>(kv_head);
  const double own =
      std::nearbyint(rule.shares.at(head) * pool + static_cast<double>(free) - given);
  return static_cast<int>(std::clamp<double>(own + static_cast<double>(window), 1, INT_MAX));
}

std::int64_t budget_plan::target(std::int64_t budget) const {
  const double dropped = std::floor(policy_.budget.drop * static_cast<double>(budget));
  return std::max<std::int64_t>(1, budget - static_cast<std::int64_t>(dropped));
}

std::int64_t budget_plan::total(std::int64_t step, bool tight) const {
  if (policy_.budget.division.total > 0) return policy_.budget.division.total;
  return saturating_product(share(step, 0, tight), std::int64_t{dims_.n_layers} * dims_.n_kv_heads);
}

// gate=constant is one budget "at every step": there is no low to shrink from.
bool budget_plan::shrinks() const {
  const gate_rule& gate = policy_.budget.gate;
  return policy_.budget.gated && gate.shrink >= 0 && gate.gate != gate_signal::constant;
}

int budget_plan::shrunk(int budget, int low, int held) const {
  const std::int64_t gradual = std::int64_t{held} - policy_.budget.gate.shrink;
  return static_cast<int>(std::max<std::int64_t>(budget, std::min<std::int64_t>(low, gradual)));
}

int budget_plan::even_budget(std::int64_t step, int layer, int held, bool tight) const {
  const int b = share(step, layer, tight);
  return shrinks() ? shrunk(b, share_of(low_, step, layer), held) : b;
}

int budget_plan::budget(std::int64_t step, int layer, int kv_head, int held, bool tight) const {
  const int b = head_share(share(step, layer, tight), layer, kv_head);
  if (!shrinks()) return b;
  return shrunk(b, head_share(share_of(low_, step, layer), layer, kv_head), held);
}

protection budget_plan::protect(int budget) const {
  const protection_rule& rule = policy_.protect;
  if (rule.heavy < 0) return {rule.sinks, rule.recent};
  return {rule.sinks, budget - static_cast<int>(std::floor(rule.heavy * budget))};
}

bool budget_plan::selects(std::int64_t step, std::int64_t n_prompt) const {
  const std::int64_t since = step - (n_prompt - 1);
  if (since <= 0) return since == 0;
  return !policy_.trigger.prefill_only && since % policy_.trigger.every == 0;
}

}  // namespace kvreplay::policies
