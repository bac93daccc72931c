#include "kernels/select.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/groups.hpp"

namespace kvreplay::kernels {
namespace {

constexpr std::uint64_t never_leaves = std::numeric_limits<std::uint64_t>::max();

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Positions as integers that order like them.
std::uint64_t ordered(std::int32_t position) {
  return static_cast<std::uint32_t>(position) ^ 0x80000000u;
}

// One tier of one head: its arrays side by side, so that an entry moves as one thing.
struct tier_entries {
  kv_cache& cache;
  int layer, head;
  tier which;
  head_store& store;
  payload_rows& rows;
  row_pages pages;

  tier_entries(kv_cache& c, int l, int h, tier t)
      : cache(c),
        layer(l),
        head(h),
        which(t),
        store(c.head(l, h)),
        rows(c.payload(l, h)),
        pages(c.rows_of(l, h, t)) {}
  std::vector<std::int32_t>& positions() {
    return which == tier::tail ? store.tail_position : store.body_position;
  }
  std::vector<float>& scores() { return which == tier::tail ? store.tail_score : store.body_score; }
  void move(std::int64_t from, std::int64_t to) {
    copy_row(rows, cache.widths(), which, row_of(pages, from), row_of(pages, to));
    const auto source = static_cast<std::size_t>(from), target = static_cast<std::size_t>(to);
    positions()[target] = positions()[source];
    scores()[target] = scores()[source];
    if (which == tier::body && !store.body_group.empty()) {
      store.body_group[target] = store.body_group[source];
    }
  }
  void cut(std::int64_t n) {
    cache.resize_payload(layer, head, which, n);
    positions().resize(static_cast<std::size_t>(n));
    scores().resize(static_cast<std::size_t>(n));
    if (which == tier::tail || store.body_group.empty()) return;
    store.body_group.resize(static_cast<std::size_t>(n));
    forget_empty_groups(cache, layer, head);
  }
};

// Holes from the front are filled with kept entries from the end.
void fill_holes(tier_entries& entries, std::span<const std::uint8_t> keep) {
  auto hole = std::int64_t{0};
  auto last = static_cast<std::int64_t>(keep.size()) - 1;
  while (true) {
    while (hole <= last && keep[static_cast<std::size_t>(hole)] != 0) ++hole;
    while (hole <= last && keep[static_cast<std::size_t>(last)] == 0) --last;
    if (hole > last) break;
    entries.move(last--, hole++);
  }
  entries.cut(hole);
}

// Kept entries move up in their order.
void gather(tier_entries& entries, std::span<const std::uint8_t> keep) {
  std::int64_t to = 0;
  for (std::size_t from = 0; from < keep.size(); ++from) {
    if (keep[from] == 0) continue;
    if (to != static_cast<std::int64_t>(from)) entries.move(static_cast<std::int64_t>(from), to);
    ++to;
  }
  entries.cut(to);
}

int compact_tier(tier_entries entries, std::span<const std::uint8_t> keep) {
  constexpr std::size_t few = 8;  // up to one in eight leaves: fewer rows move than by a gather
  const std::size_t leaving =
      keep.size() - static_cast<std::size_t>(std::count_if(keep.begin(), keep.end(),
                                                           [](std::uint8_t k) { return k != 0; }));
  if (leaving == 0) return 0;
  if (leaving * few <= keep.size()) {
    fill_holes(entries, keep);
  } else {
    gather(entries, keep);
  }
  return static_cast<int>(leaving);
}

bool is_sink(const select_item& item, std::int32_t position) { return position < item.sinks; }

bool is_protected(const select_item& item, std::int32_t position) {
  return is_sink(item, position) || position > std::int64_t{item.step} - item.recent;
}

// Ranks where more is protected than fits: sinks in order, then the newest.
std::uint64_t protection_key(const select_item& item, std::int32_t position) {
  constexpr std::uint64_t sink_class = std::uint64_t{2} << 32,
                          recent_class = std::uint64_t{1} << 32;
  if (is_sink(item, position)) return sink_class + (0xffffffffu - ordered(position));
  return is_protected(item, position) ? recent_class + ordered(position) : 0;
}

// CONF-KV's rank: EMA mass on a scale of 0 to 1, plus recency.
void rank_by_ema(const select_item& item, const head_store& store, std::vector<float>& out) {
  float largest = 0;
  for (const float e : out) largest = largest < e ? e : largest;
  const double steps = double{1} + item.step;
  const double recency = static_cast<double>(item.recency);
  const double per_log = 1.0 / std::log(1e9);
  for (int i = 0; i < store.size(); ++i) {
    float& score = out[static_cast<std::size_t>(i)];
    double worth = 0;
    if (item.rule == rank_rule::ema_log) {
      worth = 1 + static_cast<double>(std::log(std::max(score, 1e-9F))) * per_log;
    } else if (largest > 0) {
      worth = static_cast<double>(std::max(score, 0.0F)) / static_cast<double>(largest);
    }
    const double age = (double{1} + store.position(i)) / steps;
    score = static_cast<float>((1 - recency) * worth + recency * age);
  }
}

// keys[e]: the entry's rank; returns whether more is protected than the budget holds.
bool rank_entries(const select_item& item, int head, int budget, const std::vector<float>& scores,
                  std::vector<std::uint64_t>& keys) {
  const head_store& store = item.cache->head(item.layer, head);
  const int n = store.size();
  keys.resize(static_cast<std::size_t>(n));
  int guarded = 0;
  for (int e = 0; e < n; ++e) {
    const std::int32_t position = store.position(e);
    const float score = scores[static_cast<std::size_t>(e)];
    if (std::isnan(score)) {
      throw std::domain_error(fmt::format("select: layer {}, head {}, position {}: score is nan",
                                          item.layer, head, position));
    }
    const bool stays = is_protected(item, position);
    guarded += stays ? 1 : 0;
    keys[static_cast<std::size_t>(e)] = stays ? never_leaves : rank_key(score, position);
  }
  if (guarded <= budget) return false;
  for (int e = 0; e < n; ++e) {
    keys[static_cast<std::size_t>(e)] = protection_key(item, store.position(e));
  }
  return true;
}

// keep[e] = 0 for the `leaving` lowest keys.
void mark_lowest(const std::vector<std::uint64_t>& keys, int leaving,
                 std::vector<std::uint64_t>& work, std::vector<std::uint8_t>& keep) {
  keep.assign(keys.size(), 1);
  if (leaving == 1) {
    keep[static_cast<std::size_t>(std::min_element(keys.begin(), keys.end()) - keys.begin())] = 0;
    return;
  }
  work = keys;
  const auto cut = work.begin() + (leaving - 1);
  std::nth_element(work.begin(), cut, work.end());
  // The key at the cut is held by one entry only: positions are distinct, and where keys are shared
  // (protected entries; unprotected ones where protection alone decides) all stay or all leave.
  for (std::size_t e = 0; e < keys.size(); ++e) keep[e] = keys[e] > *cut ? 1 : 0;
}

void check_item(const select_item& item) {
  if (item.cache == nullptr || item.budget == nullptr) {
    throw std::invalid_argument("select: the item has no cache or no budget");
  }
  for (int h = 0; h < item.cache->shape().kv_heads; ++h) {
    if (item.budget[h] < 0) {
      throw std::invalid_argument(
          fmt::format("select: layer {}, head {}: budget is {}, expected 0 "
                      "or more",
                      item.layer, h, item.budget[h]));
    }
  }
}

}  // namespace

std::uint64_t rank_key(float score, std::int32_t position) {
  if (std::isnan(score)) throw std::domain_error("rank_key: the score is nan");
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(score + 0.0F);  // -0 becomes +0
  const std::uint32_t rising = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{rising} << 32 | ordered(position);
}

float position_hash(std::uint64_t seed, int layer, int head, std::int32_t position) {
  std::uint64_t x = mix(seed);
  x = mix(x ^ static_cast<std::uint32_t>(layer));
  x = mix(x ^ static_cast<std::uint32_t>(head));
  x = mix(x ^ static_cast<std::uint32_t>(position));
  return static_cast<float>(x >> 40) * 0x1p-24F;
}

void rank_scores(const select_item& item, int kv_head, std::vector<float>& out) {
  const head_store& store = item.cache->head(item.layer, kv_head);
  out.clear();
  switch (item.rule) {
    case rank_rule::position:  // equal scores: the newer position stays
      out.assign(static_cast<std::size_t>(store.size()), 0.0F);
      return;
    case rank_rule::hash:
      for (int e = 0; e < store.size(); ++e) {
        out.push_back(position_hash(item.seed, item.model_layer, item.one_set ? 0 : kv_head,
                                    store.position(e)));
      }
      return;
    case rank_rule::score:
    case rank_rule::ema_log:
    case rank_rule::ema_max:
      out.insert(out.end(), store.body_score.begin(), store.body_score.end());
      out.insert(out.end(), store.tail_score.begin(), store.tail_score.end());
      if (item.rule != rank_rule::score) rank_by_ema(item, store, out);
      return;
    case rank_rule::given:
      if (item.given.size() <= static_cast<std::size_t>(kv_head) ||
          item.given[static_cast<std::size_t>(kv_head)].size() !=
              static_cast<std::size_t>(store.size())) {
        throw std::invalid_argument(
            fmt::format("select: layer {}, head {}: expected {} given scores", item.layer, kv_head,
                        store.size()));
      }
      out = item.given[static_cast<std::size_t>(kv_head)];
      return;
  }
}

int compact(kv_cache& cache, int layer, int kv_head, std::span<const std::uint8_t> keep) {
  head_store& store = cache.head(layer, kv_head);
  if (keep.size() != static_cast<std::size_t>(store.size())) {
    throw std::invalid_argument(fmt::format("compact: layer {}, head {}: {} marks for {} entries",
                                            layer, kv_head, keep.size(), store.size()));
  }
  const auto body = static_cast<std::size_t>(store.body_size());
  return compact_tier({cache, layer, kv_head, tier::body}, keep.first(body)) +
         compact_tier({cache, layer, kv_head, tier::tail}, keep.subspan(body));
}

select_result select(const select_item& item) {
  check_item(item);
  select_result result;
  std::vector<float> scores;
  std::vector<std::uint64_t> keys, work;
  std::vector<std::uint8_t> keep;
  for (int h = 0; h < item.cache->shape().kv_heads; ++h) {
    const int leaving = item.cache->entries(item.layer, h) - item.budget[h];
    if (leaving <= 0) continue;
    rank_scores(item, h, scores);
    result.degenerate |= rank_entries(item, h, item.budget[h], scores, keys);
    mark_lowest(keys, leaving, work, keep);
    result.evicted += compact(*item.cache, item.layer, h, keep);
  }
  return result;
}

}  // namespace kvreplay::kernels
