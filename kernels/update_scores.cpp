#include "kernels/update_scores.hpp"

#include <fmt/format.h>

#include <limits>
#include <stdexcept>

namespace kvreplay::kernels {
namespace {

void check_item(const score_item& item) {
  if (item.cache == nullptr || item.mass == nullptr) {
    throw std::invalid_argument("update_scores: an item has no cache or no mass");
  }
  if (item.mass_stride < item.cache->max_entries(item.layer)) {
    throw std::invalid_argument(
        fmt::format("update_scores: mass_stride is {}, expected at least {}", item.mass_stride,
                    item.cache->max_entries(item.layer)));
  }
}

void check_mass(const score_item& item, int head, const head_store& store, const float* mass) {
  const int n = store.size();
  constexpr float largest = std::numeric_limits<float>::max();
  std::uint32_t bad = 0;
  for (int e = 0; e < n; ++e) bad |= mass[e] >= 0 && mass[e] <= largest ? 0u : 1u;
  if (bad == 0) return;
  for (int e = 0; e < n; ++e) {
    if (mass[e] >= 0 && mass[e] <= largest) continue;
    throw std::domain_error(fmt::format("update_scores: layer {}, head {}, position {}: mass is {}",
                                        item.layer, head, store.position(e), mass[e]));
  }
}

// score and mass [n]
void update(float* score, const float* mass, int n, score_rule rule, float decay) {
  switch (rule) {
    case score_rule::none:
      return;
    case score_rule::sum:
      for (int e = 0; e < n; ++e) score[e] = (score[e] < 0 ? 0.0F : score[e]) + mass[e];
      return;
    case score_rule::ema:
      for (int e = 0; e < n; ++e) {
        score[e] = score[e] < 0 ? mass[e] : decay * score[e] + (1 - decay) * mass[e];
      }
      return;
    case score_rule::last:
      for (int e = 0; e < n; ++e) score[e] = mass[e];
      return;
  }
}

}  // namespace

void update_scores(std::span<const score_item> items) {
  for (const score_item& item : items) {
    if (item.rule == score_rule::none) continue;
    check_item(item);
    for (int h = 0; h < item.cache->shape().kv_heads; ++h) {
      head_store& store = item.cache->head(item.layer, h);
      const float* mass = item.mass + h * item.mass_stride;
      check_mass(item, h, store, mass);
      update(store.body_score.data(), mass, store.body_size(), item.rule, item.decay);
      update(store.tail_score.data(), mass + store.body_size(), store.tail_size(), item.rule,
             item.decay);
    }
  }
}

}  // namespace kvreplay::kernels
