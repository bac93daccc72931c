#include "policies/policy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "policies/catalogue.hpp"
#include "policies/params.hpp"

namespace kvreplay::policies {
namespace {

constexpr size_t longest_spec = 4096;

using key_values = std::vector<std::pair<std::string, std::string>>;

// One `name:key=value,...` of a SPEC.
struct spec_part {
  const entry* what = nullptr;
  key_values given;
};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> out;
  size_t start = 0;
  for (size_t end; (end = text.find(separator, start)) != std::string_view::npos; start = end + 1) {
    out.push_back(text.substr(start, end - start));
  }
  out.push_back(text.substr(start));
  return out;
}

key_values parse_pairs(std::string_view owner, std::string_view text) {
  key_values out;
  for (const std::string_view item : split(text, ',')) {
    const size_t equals = item.find('=');
    if (item.empty() || equals == 0 || equals == std::string_view::npos) {
      throw spec_error(fmt::format("{}: {} is not key=value", owner, quoted(item)));
    }
    if (equals + 1 == item.size()) {
      throw spec_error(fmt::format("{}: {} has no value", owner, quoted(item)));
    }
    out.emplace_back(item.substr(0, equals), item.substr(equals + 1));
  }
  return out;
}

// `base`: the part before the first '+', which must be a policy; the others must not.
spec_part parse_part(std::string_view text, bool base) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const entry* what = find_entry(name);
  const char* expected = base ? "policy" : "modifier";
  if (what == nullptr) {
    std::vector<std::string_view> known;
    for (const entry& e : catalogue()) {
      if ((e.kind == "policy") == base) known.push_back(e.name);
    }
    throw spec_error(
        fmt::format("unknown {} {}{}", expected, quoted(name), did_you_mean(name, known)));
  }
  if ((what->kind == "policy") != base) {
    throw spec_error(fmt::format("'{}' is a {}, expected a {} {}", name, what->kind, expected,
                                 base ? "first, as in window:budget=512+int8" : "after '+'"));
  }
  if (colon == std::string_view::npos) return {what, {}};
  return {what, parse_pairs(name, text.substr(colon + 1))};
}

// Each modifier at most once, one of a slot, none but a precision on a policy that never evicts.
void check_modifiers(const entry& base, const std::vector<spec_part>& modifiers) {
  for (auto it = modifiers.begin(); it != modifiers.end(); ++it) {
    const entry& e = *it->what;
    if (!base.evicts && e.kind != "precision") {
      throw spec_error(
          fmt::format("{}: it never evicts, '+{}' has nothing to act on", base.name, e.name));
    }
    for (auto earlier = modifiers.begin(); earlier != it; ++earlier) {
      const entry& other = *earlier->what;
      if (other.name == e.name) throw spec_error(fmt::format("'+{}' is given twice", e.name));
      if (!e.slot.empty() && other.slot == e.slot) {
        throw spec_error(
            fmt::format("'+{}' and '+{}' are both the {}; give one", other.name, e.name, e.slot));
      }
    }
  }
}

// What is not said is said here: a trigger (of a policy that evicts) and a precision.
void add_defaults(const entry& base, std::vector<spec_part>& modifiers) {
  const auto add = [&](std::string_view slot, std::string_view name) {
    const bool present = std::any_of(modifiers.begin(), modifiers.end(),
                                     [&](const spec_part& m) { return m.what->slot == slot; });
    if (!present) modifiers.push_back({find_entry(name), {}});
  };
  if (base.evicts) add("trigger", "every");
  add("precision", "fp16");
}

void apply_part(const spec_part& part, policy& out) {
  const bool base = part.what->kind == "policy";
  const std::string name(part.what->name);
  // Misspelt keys come first: `budgt=128` is that, not a missing budget.
  param_reader keys(name, part.given, reader_mode::documenting);
  policy scratch;
  part.what->apply(keys, scratch);
  keys.finish();
  param_reader reader(name, part.given);
  part.what->apply(reader, out);
  out.resolved += (base ? "" : "+") + name;
  char separator = ':';
  for (const auto& [key, value] : reader.resolved()) {
    out.params.emplace_back(base ? key : name + "." + key, value);
    out.resolved += fmt::format("{}{}={}", separator, key, value);
    separator = ',';
  }
}

policy_needs needs_of(const policy& p) {
  policy_needs needs;
  const gate_rule& gate = p.budget.gate;
  needs.confidence =
      p.budget.gated && gate.gate != gate_signal::random && gate.gate != gate_signal::constant;
  needs.full_logits = needs.confidence && gate.temperature != 1;
  needs.future = needs.confidence && (gate.tau_is_quantile || gate.gate == gate_signal::shuffled);
  const score_kind kind = p.score.kind;
  needs.mass = kind == score_kind::sum || kind == score_kind::last || kind == score_kind::ema;
  switch (p.score.prompt) {
    case prompt_seed::none:
      break;
    case prompt_seed::column_sums:
      needs.prompt_rows = -1;
      break;
    case prompt_seed::mean_of_last:
      needs.prompt_rows = p.score.obs;
      break;
    case prompt_seed::last_row:
      needs.prompt_rows = 1;
      break;
  }
  const auto in_bytes = [](const amount& a) { return a.unit == amount_unit::bytes; };
  needs.bytes_budget =
      p.budget.gated ? in_bytes(gate.high) || in_bytes(gate.low) : in_bytes(p.budget.single);
  return needs;
}

void check_hard_window(const policy& p) {
  const amount& high = p.budget.gate.high;
  if (!p.protect.hard_recent || high.unit != amount_unit::entries) return;
  if (high.value < p.protect.recent) {
    throw spec_error(fmt::format("{}: high={} is below recent={}, which is never evicted", p.name,
                                 amount_text(high), p.protect.recent));
  }
}

}  // namespace

policy parse_policy(std::string_view spec) {
  if (spec.size() > longest_spec) {
    throw spec_error(fmt::format("a SPEC of {} bytes, at most {}", spec.size(), longest_spec));
  }
  const std::vector<std::string_view> texts = split(spec, '+');
  const spec_part base = parse_part(texts.front(), true);
  std::vector<spec_part> modifiers;
  for (size_t i = 1; i < texts.size(); ++i) modifiers.push_back(parse_part(texts[i], false));
  check_modifiers(*base.what, modifiers);
  add_defaults(*base.what, modifiers);
  // Entries lie in one table: their order there is the order of the resolved string.
  std::sort(modifiers.begin(), modifiers.end(),
            [](const spec_part& a, const spec_part& b) { return a.what < b.what; });

  policy out;
  out.name = base.what->name;
  out.spec = spec;
  out.budget.gated = std::any_of(modifiers.begin(), modifiers.end(),
                                 [](const spec_part& m) { return m.what->name == "confidence"; });
  apply_part(base, out);
  for (const spec_part& modifier : modifiers) {
    apply_part(modifier, out);
    if (modifier.what->slot == "precision") out.precision_name = modifier.what->name;
  }
  check_hard_window(out);
  out.needs = needs_of(out);
  return out;
}

}  // namespace kvreplay::policies
