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
  const entry* what = find_entry(name, base);
  const char* expected = base ? "policy" : "modifier";
  const entry* other = find_entry(name, !base);
  if (what == nullptr && other != nullptr) {
    throw spec_error(fmt::format("'{}' is a {}, expected a {} {}", name, other->kind, expected,
                                 base ? "first, as in window:budget=512+int8" : "after '+'"));
  }
  if (what == nullptr) {
    std::vector<std::string_view> known;
    for (const entry& e : catalogue()) {
      if ((e.kind == "policy") == base) known.push_back(e.name);
    }
    throw spec_error(
        fmt::format("unknown {} {}{}", expected, quoted(name), did_you_mean(name, known)));
  }
  if (colon == std::string_view::npos) return {what, {}};
  return {what, parse_pairs(name, text.substr(colon + 1))};
}

// Each modifier at most once, one of a slot, none but a precision on a policy that does not
// compose.
void check_modifiers(const entry& base, const std::vector<spec_part>& modifiers) {
  for (auto it = modifiers.begin(); it != modifiers.end(); ++it) {
    const entry& e = *it->what;
    if (!base.composes && e.kind != "precision") {
      throw spec_error(fmt::format("{}: '+{}' has nothing to act on; it takes a precision only",
                                   base.name, e.name));
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

// What is not said is said here: a trigger (of a policy that ranks) and a precision.
void add_defaults(const entry& base, std::vector<spec_part>& modifiers) {
  const auto add = [&](std::string_view slot, std::string_view name) {
    const bool present = std::any_of(modifiers.begin(), modifiers.end(),
                                     [&](const spec_part& m) { return m.what->slot == slot; });
    if (!present) modifiers.push_back(parse_part(name, false));
  };
  if (base.composes) add("trigger", base.trigger);
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

void needs_of_score(const policy& p, policy_needs& needs) {
  switch (p.score.kind) {
    case score_kind::position:
    case score_kind::hash:
    case score_kind::given:
      return;
    case score_kind::sum:
    case score_kind::last:
    case score_kind::ema:
    case score_kind::history:
      needs.mass = true;
      return;
    case score_kind::observed:
      needs.mass = !p.trigger.prefill_only;
      return;
    case score_kind::retention:
      needs.retention = true;
      return;
    case score_kind::key_norm:
    case score_kind::key_difference:
      needs.keys = true;
      return;
    case score_kind::redundancy:
      needs.keys = true;
      needs.prompt_rows = p.score.obs;
      return;
    case score_kind::future:
      needs.future = true;
      return;
    case score_kind::image:
      needs.image_span = true;
      needs.image_score = p.image.dominant >= 0;
      return;
  }
}

policy_needs needs_of(const policy& p) {
  policy_needs needs;
  const gate_rule& gate = p.budget.gate;
  needs.confidence =
      p.budget.gated && gate.gate != gate_signal::random && gate.gate != gate_signal::constant;
  needs.full_logits = needs.confidence && gate.temperature != 1;
  needs.future = needs.confidence && (gate.tau_is_quantile || gate.gate == gate_signal::shuffled);
  needs_of_score(p, needs);
  switch (p.score.prompt) {
    case prompt_seed::none:
      break;
    case prompt_seed::column_sums:
      needs.prompt_rows = -1;
      break;
    case prompt_seed::mean_of_last:
      needs.prompt_rows = p.score.obs;
      break;
    case prompt_seed::last_history:
      needs.prompt_rows = p.score.history;
      break;
    case prompt_seed::last_row:
      needs.prompt_rows = 1;
      break;
  }
  needs.value_norm = p.critical.on;
  needs.rope = p.rerotate;
  needs.keys = needs.keys || p.rerotate;
  needs.all_layers = p.budget.division.kind == division_kind::global;
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

// global:total=N stands in place of the base's budget=.
bool gives_total(const std::vector<spec_part>& modifiers) {
  return std::any_of(modifiers.begin(), modifiers.end(), [](const spec_part& m) {
    return m.what->name == "global" &&
           std::any_of(m.given.begin(), m.given.end(),
                       [](const auto& p) { return p.first == "total" && p.second != "budget"; });
  });
}

void check_total(const policy& p) {
  if (p.budget.division.total > 0 && p.budget.gated) {
    throw spec_error(fmt::format("{}: total= and a gate are two budgets; give one", p.name));
  }
}

}  // namespace

bool has_shares(const score_rule& rule) {
  switch (rule.kind) {
    case score_kind::redundancy:
    case score_kind::key_norm:
    case score_kind::key_difference:
      return false;
    case score_kind::retention:
      return rule.exponential;
    default:
      return true;
  }
}

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
  out.budget.division.total = gives_total(modifiers) ? 1 : 0;
  apply_part(base, out);
  for (const spec_part& modifier : modifiers) {
    apply_part(modifier, out);
    if (modifier.what->slot == "precision") out.precision_name = modifier.what->name;
  }
  check_hard_window(out);
  check_total(out);
  out.needs = needs_of(out);
  return out;
}

policy without_modifier(const policy& p, std::string_view modifier) {
  std::string spec;
  for (const std::string_view part : split(p.resolved, '+')) {
    if (!spec.empty() && part.substr(0, part.find(':')) == modifier) continue;
    spec += fmt::format("{}{}", spec.empty() ? "" : "+", part);
  }
  return parse_policy(spec);
}

}  // namespace kvreplay::policies
