#include "replay/gap.hpp"

#include <doctest/doctest.h>

#include <string>
#include <vector>

namespace kvreplay::replay {
namespace {

reports::result row(const std::string& name, double bytes, double ppl) {
  reports::result out;
  out.name = name;
  out.policy = name + ":" + std::to_string(static_cast<int>(bytes));
  out.mode = "closed";
  out.memory.mean_bytes = bytes;
  out.quality.ppl = ppl;
  out.quality.full_ppl = 10;
  return out;
}

TEST_CASE("the reference is the largest window that takes no more bytes") {
  std::vector<reports::result> rows{row("window", 50, 40),    row("window", 80, 30),
                                    row("window", 120, 20),   row("h2o", 100, 12),
                                    row("streaming", 60, 14), row("h2o", 40, 35)};
  rows.push_back(row("window", 90, 20));
  rows.back().sequence = 1;  // another text
  rows.push_back(row("window", 95, 20));
  rows.back().mode = "open";
  fill_gaps(rows);
  CHECK(*rows[3].quality.gap_closed == doctest::Approx(0.9));  // (30 - 12) / (30 - 10)
  CHECK(*rows[3].quality.gap_closed_streaming == doctest::Approx(0.5));
  CHECK(rows[3].gap_reference == "window:80; streaming:60");
  CHECK_FALSE(rows[5].quality.gap_closed);  // nothing is smaller
  CHECK(rows[5].gap_reference.empty());
  CHECK_FALSE(rows[1].quality.gap_closed);  // against itself
  CHECK_FALSE(rows[7].quality.gap_closed);
}

TEST_CASE("no gap where the reference is as good as the full cache") {
  std::vector<reports::result> rows{row("window", 50, 10.04), row("h2o", 60, 10.01)};
  fill_gaps(rows);
  CHECK_FALSE(rows[1].quality.gap_closed);
  rows[0].quality.ppl = 10.06;
  fill_gaps(rows);
  CHECK(*rows[1].quality.gap_closed == doctest::Approx(0.05 / 0.06));
}

}  // namespace
}  // namespace kvreplay::replay
