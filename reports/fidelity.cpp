#include "reports/fidelity.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "reports/correlation.hpp"
#include "reports/text.hpp"

namespace kvreplay::reports {
namespace {

using json = nlohmann::ordered_json;

constexpr const char* schema = "kvreplay.fidelity/1";
constexpr int resamples = 1000;
constexpr std::uint64_t bootstrap_seed = 20240607;

struct metric {
  const char* name;
  bool higher_is_better;
};
constexpr metric open_metrics[] = {{"attention_recall", true},   {"output_rel_l2", false},
                                   {"output_rel_l2_p95", false}, {"output_cosine", true},
                                   {"output_l1", false},         {"head_l1", false},
                                   {"residual_rel_l2", false},   {"direct_kl", false},
                                   {"direct_nll", false},        {"kl_proxy", false}};
constexpr metric closed_metrics[] = {{"logit_kl", false}, {"ppl", false}, {"top1_agreement", true}};

maybe quality_of(const result& row, std::string_view name) {
  maybe out;
  for_each_number(row, [&](std::string_view section, std::string_view n, const maybe& value) {
    if (section == "quality" && n == name) out = value;
  });
  return out;
}

struct joined {
  const result* open = nullptr;
  const result* closed = nullptr;
};
using text_rows = std::map<std::string, joined>;  // by policy

// Texts by name, in the order of the rows.
std::vector<std::pair<std::string, text_rows>> join(std::span<const result> rows) {
  std::vector<std::pair<std::string, text_rows>> out;
  for (const auto& row : rows) {
    if (row.status != "ok" || (row.mode != "open" && row.mode != "closed")) continue;
    const auto name = fmt::format("{}#{}", row.trace, row.sequence);
    auto at = std::find_if(out.begin(), out.end(), [&](const auto& t) { return t.first == name; });
    if (at == out.end()) at = out.insert(at, {name, {}});
    auto& both = at->second[row.policy];
    (row.mode == "open" ? both.open : both.closed) = &row;
  }
  return out;
}

bool usable(const joined& j) {
  return j.open != nullptr && j.closed != nullptr && j.closed->quality.logit_kl.value_or(0) != 0;
}

// Columns over the policies of one text; nothing where a row lacks the score.
std::optional<std::vector<double>> column(const text_rows& text,
                                          const std::vector<std::string>& policies, bool open,
                                          const char* name) {
  std::vector<double> out;
  for (const auto& policy : policies) {
    const joined& j = text.at(policy);
    const maybe value = quality_of(open ? *j.open : *j.closed, name);
    if (!value || !std::isfinite(*value)) return std::nullopt;
    out.push_back(*value);
  }
  return out;
}

std::vector<inversion> inversions_of(std::span<const double> open, std::span<const double> closed,
                                     bool same_direction) {
  std::vector<inversion> out;
  for (std::size_t i = 0; i < open.size(); ++i) {
    for (std::size_t j = 0; j < open.size(); ++j) {
      if (!(closed[i] > closed[j])) continue;
      if (same_direction ? open[i] < open[j] : open[i] > open[j]) out.push_back({i, j});
    }
  }
  return out;
}

using statistic = double (*)(std::span<const double>, std::span<const double>);
using column_pair = std::pair<std::vector<double>, std::vector<double>>;

maybe finite_or_none(double x) { return std::isfinite(x) ? maybe(x) : std::nullopt; }

maybe mean_over_texts(std::span<const column_pair> texts, statistic f) {
  double sum = 0;
  for (const auto& [x, y] : texts) sum += f(x, y);
  return finite_or_none(sum / static_cast<double>(texts.size()));
}

// The same draw of policies in every text.
std::pair<maybe, maybe> interval(std::span<const column_pair> texts, statistic f) {
  std::mt19937_64 generator(bootstrap_seed);
  const std::size_t n = texts.front().first.size();
  std::vector<double> values;
  for (int r = 0; r < resamples; ++r) {
    std::vector<std::size_t> draw(n);
    for (auto& d : draw) d = generator() % n;
    std::vector<column_pair> drawn;
    for (const auto& [x, y] : texts) {
      column_pair p;
      for (const std::size_t i : draw) {
        p.first.push_back(x[i]);
        p.second.push_back(y[i]);
      }
      drawn.push_back(std::move(p));
    }
    if (const maybe v = mean_over_texts(drawn, f)) values.push_back(*v);
  }
  if (values.size() < resamples / 2) return {};
  std::sort(values.begin(), values.end());
  const auto rank = [&](double share) {
    return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
  };
  return {rank(0.025), rank(0.975)};
}

rank_agreement agreement(std::string trace, const metric& open, const metric& closed,
                         std::span<const column_pair> texts) {
  rank_agreement out{std::move(trace), open.name, closed.name, {}, {}, {}, {}, {}};
  out.spearman = mean_over_texts(texts, spearman);
  out.kendall = mean_over_texts(texts, kendall);
  out.spearman_ci = interval(texts, spearman);
  out.kendall_ci = interval(texts, kendall);
  if (texts.size() == 1) {
    // "worse in the closed loop" is a larger value but for top-1 agreement.
    auto worse = texts[0].second;
    for (double& x : worse) x = closed.higher_is_better ? -x : x;
    out.inversions = inversions_of(texts[0].first, worse, !open.higher_is_better);
  }
  return out;
}

json number(const maybe& value) { return value ? json(*value) : json(nullptr); }

std::string rounded(double x) { return fmt::format("{:.2f}", x); }

}  // namespace

fidelity measure_fidelity(std::span<const result> rows) {
  const auto texts = join(rows);
  fidelity out;
  for (const auto& [name, text] : texts) out.traces.push_back(name);
  for (const auto& row : rows) {
    const auto known = std::find(out.policies.begin(), out.policies.end(), row.policy);
    const bool everywhere = std::all_of(texts.begin(), texts.end(), [&](const auto& t) {
      const auto at = t.second.find(row.policy);
      return at != t.second.end() && usable(at->second);
    });
    if (known == out.policies.end() && everywhere) out.policies.push_back(row.policy);
  }
  if (out.policies.size() < 3) {
    throw report_error(
        fmt::format("fidelity: {} policies with open and closed rows in every text, expected at "
                    "least 3 beside full (replay --model DIR --mode both gives both)",
                    out.policies.size()));
  }
  for (const auto& closed : closed_metrics) {
    for (const auto& open : open_metrics) {
      std::vector<column_pair> columns;
      for (const auto& [name, text] : texts) {
        auto x = column(text, out.policies, true, open.name);
        auto y = column(text, out.policies, false, closed.name);
        if (x && y) columns.push_back({std::move(*x), std::move(*y)});
      }
      if (columns.size() != texts.size()) continue;
      if (columns.size() > 1) out.agreements.push_back(agreement("", open, closed, columns));
      for (std::size_t i = 0; i < columns.size(); ++i) {
        out.agreements.push_back(agreement(out.traces[i], open, closed, {&columns[i], 1}));
      }
    }
  }
  return out;
}

std::string fidelity_line(const fidelity& f) {
  std::vector<const rank_agreement*> best;
  const std::string trace = f.traces.size() > 1 ? "" : f.traces.front();
  for (const auto& a : f.agreements) {
    if (a.closed == "logit_kl" && a.trace == trace && a.spearman) best.push_back(&a);
  }
  std::stable_sort(best.begin(), best.end(), [](const auto* a, const auto* b) {
    return std::fabs(*a->spearman) > std::fabs(*b->spearman);
  });
  std::string out = fmt::format(
      "fidelity: Spearman with closed-loop KL over {} policies, {} text{}:", f.policies.size(),
      f.traces.size(), f.traces.size() > 1 ? "s" : "");
  for (const auto* a : best) {
    out += fmt::format("{} {} {}", a == best.front() ? "" : ",", a->open, rounded(*a->spearman));
    if (a->spearman_ci.first && a->spearman_ci.second) {
      out +=
          fmt::format(" [{}, {}]", rounded(*a->spearman_ci.first), rounded(*a->spearman_ci.second));
    }
  }
  return out;
}

std::string to_json(const fidelity& f, const tool_info& tool) {
  json agreements = json::array();
  for (const auto& a : f.agreements) {
    json inversions = json::array();
    for (const auto& i : a.inversions) inversions.push_back({i.worse, i.better});
    agreements.push_back(
        {{"trace", a.trace.empty() ? json(nullptr) : json(escape_bytes(a.trace, controls::keep))},
         {"open", a.open},
         {"closed", a.closed},
         {"spearman", number(a.spearman)},
         {"spearman_ci", {number(a.spearman_ci.first), number(a.spearman_ci.second)}},
         {"kendall", number(a.kendall)},
         {"kendall_ci", {number(a.kendall_ci.first), number(a.kendall_ci.second)}},
         {"inversions", std::move(inversions)}});
  }
  json policies = json::array(), traces = json::array();
  for (const auto& p : f.policies) policies.push_back(escape_bytes(p, controls::keep));
  for (const auto& t : f.traces) traces.push_back(escape_bytes(t, controls::keep));
  const json all = {{"schema", schema},
                    {"version", tool.version},
                    {"revision", tool.revision},
                    {"command", escape_bytes(tool.command, controls::keep)},
                    {"summary", escape_bytes(fidelity_line(f), controls::keep)},
                    {"policies", std::move(policies)},
                    {"traces", std::move(traces)},
                    {"agreements", std::move(agreements)}};
  return all.dump(1) + "\n";
}

std::string read_fidelity_line(const std::string& text, const std::string& path) {
  const json all = json::parse(text, nullptr, false);
  if (!all.is_object() || all.value("schema", json()) != schema ||
      !all.value("summary", json()).is_string()) {
    throw report_error(fmt::format("{}: not a file of kvreplay fidelity ({})", path, schema));
  }
  return all["summary"].get<std::string>();
}

}  // namespace kvreplay::reports
