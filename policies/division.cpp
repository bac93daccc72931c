#include "policies/division.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvreplay::policies {
namespace {

struct contender {
  float score;
  std::int32_t position;
  std::int32_t head;
};

bool before(const contender& a, const contender& b) {
  if (a.score != b.score) return a.score > b.score;
  if (a.position != b.position) return a.position > b.position;
  return a.head < b.head;
}

bool ranks_before(const candidate& a, const candidate& b) {
  return a.score != b.score ? a.score > b.score : a.position > b.position;
}

}  // namespace

std::vector<int> divide(std::span<const std::vector<candidate>> candidates,
                        std::span<const int> first, std::int64_t total) {
  std::vector<int> counts(candidates.size(), 0);
  std::vector<contender> rest;
  std::vector<candidate> own;
  std::int64_t left = total;
  for (size_t h = 0; h < candidates.size(); ++h) {
    own = candidates[h];
    const auto reserved = std::min<std::ptrdiff_t>(first[h], std::ssize(own));
    std::nth_element(own.begin(), own.begin() + reserved, own.end(), ranks_before);
    counts[h] = static_cast<int>(reserved);
    left -= reserved;
    for (auto c = own.begin() + reserved; c != own.end(); ++c) {
      rest.push_back({c->score, c->position, static_cast<std::int32_t>(h)});
    }
  }
  const auto taken = std::clamp<std::ptrdiff_t>(left, 0, std::ssize(rest));
  std::nth_element(rest.begin(), rest.begin() + taken, rest.end(), before);
  for (auto c = rest.begin(); c != rest.begin() + taken; ++c)
    ++counts[static_cast<size_t>(c->head)];
  return counts;
}

std::vector<int> adaptive_counts(const division_rule& rule,
                                 std::span<const std::vector<candidate>> candidates,
                                 std::span<const int> free) {
  const auto total = std::accumulate(free.begin(), free.end(), std::int64_t{0});
  std::vector<int> first(free.size(), 0);
  const auto floor_of = [&](int f) { return static_cast<int>(std::floor(rule.floor * f)); };
  for (size_t h = 0; h < free.size() && !rule.blend; ++h) {
    first[h] = std::min(free[h], std::max(1, floor_of(free[h])));
  }
  std::vector<int> counts = divide(candidates, first, total);
  for (size_t h = 0; h < free.size() && rule.blend; ++h) {
    // std::nearbyint: half to even in the default rounding mode.
    counts[h] = static_cast<int>(std::nearbyint(counts[h] * (1 - rule.floor) + floor_of(free[h])));
  }
  return counts;
}

}  // namespace kvreplay::policies
