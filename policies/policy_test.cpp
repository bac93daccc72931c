#include "policies/policy.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

std::string error_of(std::string_view spec) {
  try {
    parse_policy(spec);
  } catch (const spec_error& e) {
    return e.what();
  }
  return "";
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// Refused, on one line, with all of `parts` in the message.
void check_refused(std::string_view spec, const std::vector<std::string_view>& parts) {
  const std::string error = error_of(spec);
  CAPTURE(spec);
  CAPTURE(error);
  CHECK(!error.empty());
  CHECK(error.find('\n') == std::string::npos);
  for (const std::string_view part : parts) {
    CAPTURE(part);
    CHECK(contains(error, part));
  }
}

TEST_CASE("a SPEC becomes rules, with the catalogue's defaults") {
  const policy window = parse_policy("window:budget=512");
  CHECK(window.name == "window");
  CHECK(window.spec == "window:budget=512");
  CHECK(window.score.kind == score_kind::position);
  CHECK(window.budget.single == amount{amount_unit::entries, 512});
  CHECK(window.protect.sinks == 0);
  CHECK(window.precision_name == "fp16");
  CHECK(window.trigger.every == 1);

  const policy streaming = parse_policy("streaming:budget=20%");
  CHECK(streaming.protect.sinks == 4);
  CHECK(streaming.budget.single == amount{amount_unit::percent, 20});

  const policy random =
      parse_policy("random:budget=64MiB,recent=3,sinks=2,seed=18446744073709551615");
  CHECK(random.score.kind == score_kind::hash);
  CHECK(random.protect.recent == 3);
  CHECK(random.protect.sinks == 2);
  CHECK(random.score.seed == 18446744073709551615ULL);
  CHECK(random.budget.single == amount{amount_unit::bytes, 67108864});

  const policy h2o = parse_policy("h2o:budget=8,gqa=max");
  CHECK(h2o.score.kind == score_kind::sum);
  CHECK(h2o.score.gqa == group_reduce::max);
  CHECK(h2o.score.scope == score_scope::head);
  CHECK(h2o.score.prompt == prompt_seed::column_sums);
  CHECK(h2o.protect.heavy == 0.5);

  const policy tova = parse_policy("tova:budget=8,protect_last=2");
  CHECK(tova.score.kind == score_kind::last);
  CHECK(tova.score.scope == score_scope::layer);
  CHECK(tova.score.prompt == prompt_seed::last_row);
  CHECK(tova.protect.recent == 2);

  const policy full = parse_policy("full");
  CHECK(full.budget.single.unit == amount_unit::everything);
  CHECK(!full.budget.gated);
}

TEST_CASE("confkv's defaults") {
  const policy p = parse_policy("confkv");
  const gate_rule& gate = p.budget.gate;
  CHECK(p.budget.gated);
  CHECK(gate.tau == 0.6);
  CHECK(!gate.tau_is_quantile);
  CHECK(gate.high == amount{amount_unit::entries, 256});
  CHECK(gate.low == amount{amount_unit::entries, 768});
  CHECK(gate.w_entropy == 0.4);
  CHECK(gate.w_margin == 0.3);
  CHECK(gate.w_top == 0.3);
  CHECK(gate.temperature == 1);
  CHECK(gate.smooth == 0);
  CHECK(gate.hold == 0);
  CHECK(gate.shrink == -1);
  CHECK(gate.gate == gate_signal::signal);
  CHECK(p.protect.recent == 64);
  CHECK(p.protect.sinks == 0);
  CHECK(p.score.kind == score_kind::ema);
  CHECK(p.score.decay == 0.97);
  CHECK(p.score.recency == 0.05);
  CHECK(p.score.mass == mass_scale::log);
  CHECK(p.score.prompt == prompt_seed::mean_of_last);
  CHECK(p.score.obs == 32);
  CHECK(p.score.gqa == group_reduce::mean);
  CHECK(p.precision.body == body_kind::none);
  CHECK(!p.budget.pyramid.on);
  CHECK(parse_policy("confkv-l").budget.pyramid.on);
  CHECK(parse_policy("confkv-l").budget.pyramid.beta == 2);
}

TEST_CASE("a name that composes parts takes the keys of all its parts") {
  const policy composed = parse_policy("confkv-l:high=128,low=512,beta=3,total=0.5,exact=0");
  const policy spelled = parse_policy("confkv:high=128,low=512+pyramid:beta=3,total=0.5,exact=0");
  CHECK(composed.budget.gate.high == spelled.budget.gate.high);
  CHECK(composed.budget.pyramid.beta == spelled.budget.pyramid.beta);
  CHECK(composed.budget.pyramid.total == spelled.budget.pyramid.total);
  CHECK(composed.budget.pyramid.exact == spelled.budget.pyramid.exact);
  CHECK(!composed.budget.pyramid.exact);
  check_refused("confkv-l+pyramid:beta=3", {"confkv-l", "pyramid", "beta="});
  check_refused("confkv+confidence:high=64,low=128", {"confkv", "gate of its own"});
}

TEST_CASE("modifiers come in any order; the resolved string has one order") {
  const std::string expected =
      "h2o:budget=100,heavy=0.5,gqa=mean,scope=head+pyramid:beta=2,total=1,exact=1"
      "+protect:sinks=4,recent=base+every:n=8"
      "+int8:window=16,sinks=0,scales=hybrid";
  CHECK(parse_policy("h2o:budget=100+int8:window=16+every:n=8+protect:sinks=4+pyramid").resolved ==
        expected);
  CHECK(parse_policy("h2o:budget=100+pyramid+protect:sinks=4+every:n=8+int8:window=16").resolved ==
        expected);
  CHECK(parse_policy("full").resolved == "full+fp16");
  CHECK(parse_policy("window:budget=1").resolved == "window:budget=1+every:n=1+fp16");
}

void check_same(const policy& a, const policy& b) {
  CHECK(a.name == b.name);
  CHECK(a.resolved == b.resolved);
  CHECK(a.params == b.params);
  CHECK(a.precision_name == b.precision_name);
  CHECK(a.score.kind == b.score.kind);
  CHECK(a.score.gqa == b.score.gqa);
  CHECK(a.score.scope == b.score.scope);
  CHECK(a.score.prompt == b.score.prompt);
  CHECK(a.score.obs == b.score.obs);
  CHECK(a.score.decay == b.score.decay);
  CHECK(a.score.recency == b.score.recency);
  CHECK(a.score.seed == b.score.seed);
  CHECK(a.budget.single == b.budget.single);
  CHECK(a.budget.gated == b.budget.gated);
  CHECK(a.budget.gate.tau == b.budget.gate.tau);
  CHECK(a.budget.gate.tau_is_quantile == b.budget.gate.tau_is_quantile);
  CHECK(a.budget.gate.high == b.budget.gate.high);
  CHECK(a.budget.gate.low == b.budget.gate.low);
  CHECK(a.budget.gate.shrink == b.budget.gate.shrink);
  CHECK(a.budget.gate.seed == b.budget.gate.seed);
  CHECK(a.budget.pyramid.on == b.budget.pyramid.on);
  CHECK(a.budget.pyramid.beta == b.budget.pyramid.beta);
  CHECK(a.protect.sinks == b.protect.sinks);
  CHECK(a.protect.recent == b.protect.recent);
  CHECK(a.protect.heavy == b.protect.heavy);
  CHECK(a.trigger.every == b.trigger.every);
  CHECK(a.trigger.prefill_only == b.trigger.prefill_only);
  CHECK(a.precision.body == b.precision.body);
  CHECK(a.precision.scales == b.precision.scales);
  CHECK(a.precision.channel_static == b.precision.channel_static);
  CHECK(a.precision.margin == b.precision.margin);
  CHECK(a.needs.confidence == b.needs.confidence);
  CHECK(a.needs.prompt_rows == b.needs.prompt_rows);
}

TEST_CASE("the resolved string reads back to the same policy") {
  std::vector<std::string> specs{
      "random:recent=64+confidence:tau=q0.7,high=64,low=20%,gate=random,p=0.1,seed=9",
      "h2o:budget=12.5%,heavy=0.1+protect:recent=3",
      "confkv:w_entropy=0.1,w_margin=0.2,w_top=0.7,shrink=2,hold=3,smooth=0.30000000000000004",
      "confkv-l:beta=1e3,tau=1e-5,gate=inverted+prefill+int8:scales=channel,update=static,margin=2",
      "window:budget=1.5MiB+int8:scales=channel",
      "window:budget=100kB+int8:scales=token",
      "window:budget=7+int8:scales=group+paged:page=64",
      "h2o:budget=20%+int4:window=5,sinks=1",
      "window:budget=0.0001%",
      "window:budget=1000001B"};
  for (const entry& e : catalogue()) specs.emplace_back(e.example);
  specs.emplace_back("kept:file=a%2Cb%3Ac%2Bd%25e.csv");
  specs.emplace_back("trimkv:score=exp+global:total=900+critical:epsilon=0+rerotate");
  for (const std::string& spec : specs) {
    CAPTURE(spec);
    const policy once = parse_policy(spec);
    check_same(once, parse_policy(once.resolved));
  }
}

// NAME with the keys that it cannot do without.
std::string needed(const entry& e, bool gated = false) {
  std::string out(e.name);
  char separator = ':';
  for (const param_doc& doc : entry_params(e)) {
    const bool budget = doc.name == "budget";
    if (doc.default_text != "required" || (budget && gated)) continue;
    out += fmt::format("{}{}={}", separator, doc.name, doc.range_text == "text" ? "f" : "64");
    separator = ',';
  }
  return out;
}

TEST_CASE("every policy with every modifier that fits it is idempotent too") {
  int combinations = 0;
  for (const entry& base : catalogue()) {
    if (base.kind != "policy") continue;
    for (const entry& modifier : catalogue()) {
      if (modifier.kind == "policy") continue;
      const std::string spec = fmt::format("{}+{}", needed(base, modifier.gates), needed(modifier));
      CAPTURE(spec);
      CHECK((error_of(spec).empty()) == fits(base, modifier));
      if (!fits(base, modifier)) continue;
      const policy once = parse_policy(spec);
      check_same(once, parse_policy(once.resolved));
      ++combinations;
    }
  }
  CHECK(combinations == 239);
}

TEST_CASE("params list every key, a modifier's with its name before it") {
  const policy p = parse_policy("h2o:budget=5+every:n=2+int8:window=1");
  const std::vector<std::pair<std::string, std::string>> expected{
      {"budget", "5"},  {"heavy", "0.5"},     {"gqa", "mean"},     {"scope", "head"},
      {"every.n", "2"}, {"int8.window", "1"}, {"int8.sinks", "0"}, {"int8.scales", "hybrid"}};
  CHECK(p.params == expected);
}

TEST_CASE("budgets that cannot be read are refused by key, value and range") {
  check_refused("h2o:budget=-1", {"h2o", "budget='-1'", "1..2147483647"});
  check_refused("h2o:budget=0", {"budget='0'", "1..2147483647"});
  check_refused("h2o:budget=2147483648", {"1..2147483647"});
  check_refused("h2o:budget=18446744073709551616", {"1..2147483647"});
  check_refused("h2o:budget=0.2", {"budget='0.2'", "write 20%"});
  check_refused("h2o:budget=0.07", {"write 7%"});
  check_refused("h2o:budget=-.5", {"budget='-.5'", "20%"});
  for (const char* value : {"1e3", "nan", "inf", " 5", "5 ", "0x10", "12.5", "%", "B", "5\r"}) {
    check_refused(std::string("h2o:budget=") + value, {"h2o: budget='"});
  }
  for (const char* value : {"0%", "-5%", "101%", "1e1%", "nan%", "20%%"}) {
    check_refused(std::string("h2o:budget=") + value, {"above 0% and at most 100%"});
  }
  for (const char* value : {"0MiB", "-1MiB", "64mb", "1e3kB", "64KB", "9007199254740994B"}) {
    check_refused(std::string("h2o:budget=") + value, {"h2o: budget='"});
  }
  check_refused("h2o:budget=", {"h2o", "'budget='", "no value"});
  check_refused("h2o:budget=+5", {"h2o", "'budget='", "no value"});  // '+' opens a modifier
  check_refused("h2o", {"budget= is required"});
  check_refused("window+every:n=2", {"budget= is required"});
  check_refused("confkv:high=0", {"high='0'"});
}

TEST_CASE("budgets at the edge of what is allowed") {
  CHECK(parse_policy("h2o:budget=1").budget.single.value == 1);
  CHECK(parse_policy("h2o:budget=2147483647").budget.single.value == 2147483647);
  CHECK(parse_policy("h2o:budget=100%").budget.single.value == 100);
  CHECK(parse_policy("h2o:budget=1kB").budget.single.value == 1000);
  CHECK(parse_policy("h2o:budget=1MB").budget.single.value == 1e6);
  CHECK(parse_policy("h2o:budget=1GB").budget.single.value == 1e9);
  CHECK(parse_policy("h2o:budget=1KiB").budget.single.value == 1024);
  CHECK(parse_policy("h2o:budget=1GiB").budget.single.value == 1073741824);
  CHECK(parse_policy("h2o:budget=0.5GiB").budget.single.value == 536870912);
  CHECK(parse_policy("h2o:budget=9007199254740992B").budget.single.value == 9007199254740992.0);
}

TEST_CASE("unknown names and keys are refused with the nearest") {
  check_refused("h2o:budgt=128", {"h2o", "'budgt'", "did you mean 'budget'?"});
  check_refused("h2o:budget=128,hevay=0.5", {"'hevay'", "did you mean 'heavy'?"});
  check_refused("widnow:budget=3", {"unknown policy 'widnow'", "did you mean 'window'?"});
  check_refused("h2o:budget=3+pyramd", {"unknown modifier 'pyramd'", "did you mean 'pyramid'?"});
  check_refused("h2o:budget=3+quantise", {"unknown modifier", "known: pyramid"});
  check_refused("h2o:budget=3,xyzzy=1", {"'xyzzy'", "known: budget, heavy"});
  check_refused("h2o:budget=3,gqa=men", {"gqa='men'", "mean | max | sum", "did you mean 'mean'?"});
  check_refused("confkv:w_entropy=0.5,w_margin=0.3,w_tp=0.2", {"'w_tp'", "did you mean 'w_top'?"});
  check_refused("full:budget=3", {"'budget'", "it takes none"});
  check_refused("confkv:budget=3", {"'budget'", "known: tau, high, low"});
  check_refused("", {"unknown policy ''"});
  check_refused("+int8", {"unknown policy ''"});
  check_refused("h2o:budget=3+", {"unknown modifier ''"});
  check_refused("Window:budget=3", {"did you mean 'window'?"});
  check_refused("pyramid:beta=2", {"'pyramid' is a modifier", "expected a policy"});
  check_refused("h2o:budget=3+window:budget=3", {"'window' is a policy", "expected a modifier"});
  check_refused("window:budget=\n3", {"\\x0a"});
  check_refused("window:" + std::string(5000, 'x') + "=1", {"5009 bytes", "4096"});
  check_refused("window:" + std::string(2000, 'x') + "=1", {"unknown key"});
}

TEST_CASE("malformed lists are refused") {
  check_refused("h2o:budget=1,budget=1", {"h2o", "'budget' is given twice"});
  check_refused("window:", {"window", "not key=value"});
  check_refused("window:budget=3,", {"not key=value"});
  check_refused("window:budget=3,,sinks=3", {"not key=value"});
  check_refused("window:budget", {"'budget' is not key=value"});
  check_refused("window:=3", {"'=3' is not key=value"});
  check_refused("h2o:budget=3+int8+int8", {"'+int8' is given twice"});
  check_refused("h2o:budget=3+int8+fp16", {"'+int8' and '+fp16'", "precision"});
  check_refused("h2o:budget=3+every:n=2+prefill", {"'+every' and '+prefill'", "trigger"});
}

TEST_CASE("numbers out of range are refused") {
  check_refused("h2o:budget=3,heavy=1.5", {"heavy='1.5'", "0..1"});
  check_refused("h2o:budget=3,heavy=-.5", {"heavy='-.5'", "0..1"});
  check_refused("h2o:budget=3,heavy=nan", {"heavy='nan'"});
  check_refused("h2o:budget=3,heavy=inf", {"heavy='inf'"});
  check_refused("h2o:budget=3,heavy=1e999", {"heavy='1e999'"});
  check_refused("streaming:budget=3,sinks=-1", {"sinks='-1'", "0.."});
  check_refused("streaming:budget=3,sinks=1e3", {"sinks='1e3'", "whole number"});
  check_refused("streaming:budget=3,sinks=18446744073709551616", {"sinks="});
  check_refused("random:budget=3,seed=18446744073709551616", {"seed=", "18446744073709551615"});
  check_refused("random:budget=3,seed=-1", {"seed='-1'"});
  check_refused("confkv:tau=-.5", {"tau='-.5'", "0..2"});
  check_refused("confkv:tau=2.1", {"tau='2.1'", "0..2"});
  check_refused("confkv:tau=q1.1", {"tau='q1.1'", "q0..q1"});
  check_refused("confkv:tau=q", {"tau='q'"});
  check_refused("confkv:shrink=some", {"shrink='some'", "'all'"});
  check_refused("confkv:temperature=0", {"temperature='0'"});
  check_refused("confkv:obs=0", {"obs='0'", "1.."});
  check_refused("h2o:budget=3+every:n=0", {"every", "n='0'", "1.."});
  check_refused("h2o:budget=3+pyramid:beta=0.5", {"pyramid", "beta='0.5'"});
  check_refused("h2o:budget=3+pyramid:total=0", {"pyramid", "total='0'"});
  check_refused("h2o:budget=3+pyramid:exact=2", {"exact='2'", "0..1"});
  check_refused("h2o:budget=3+protect:sinks=-1", {"sinks='-1'", "'base'"});
  check_refused("h2o:budget=3+int8:window=-1", {"window='-1'"});
}

TEST_CASE("parameters that exclude each other") {
  check_refused("h2o:budget=3+confidence:high=1,low=2", {"budget='3'", "confidence"});
  check_refused("h2o+confidence:high=1", {"confidence: low= is required"});
  check_refused("h2o+confidence:low=1", {"confidence: high= is required"});
  check_refused("confkv:w_top=0.4", {"w_top='0.4'", "is 1.1, expected 1"});
  check_refused("confkv:w_entropy=0.5", {"w_entropy='0.5'", "is 1.1"});
  CHECK(error_of("confkv:w_entropy=0.1,w_margin=0.2,w_top=0.7").empty());
  CHECK(error_of("confkv:w_entropy=0.3333333333,w_margin=0.3333333333,w_top=0.3333333333").empty());
  check_refused("confkv:w_entropy=0.333333333,w_margin=0.333333333,w_top=0.33333333",
                {"expected 1"});
  check_refused("h2o:budget=3+paged:page=24", {"page='24'", "power of two"});
  check_refused("h2o:budget=3+int8:update=grow", {"update='grow'", "scales=channel"});
  check_refused("h2o:budget=3+int8:scales=token,margin=2", {"margin='2'", "scales=channel"});
  check_refused("h2o:budget=3+int8:scales=channel,margin=2", {"margin='2'", "update=static"});
  check_refused("h2o:budget=3+int8:scales=groups",
                {"scales='groups'", "hybrid | token | channel | group"});
  check_refused("h2o:budget=3+int4:scales=group", {"'scales'"});
  check_refused("h2o:budget=3+int4+int8", {"+int8", "+int4", "precision"});
  check_refused("tova:budget=3,gqa=max", {"gqa='max'", "scope=head"});
  CHECK(error_of("tova:budget=3,gqa=max,scope=head").empty());
  check_refused("full+prefill", {"full", "'+prefill'"});
  check_refused("full+confidence:high=1,low=2", {"full", "'+confidence'"});
}

TEST_CASE("confkv refuses high below recent and nothing else about their order") {
  check_refused("confkv:high=63", {"confkv", "high=63", "recent=64"});
  CHECK(error_of("confkv:high=64").empty());
  CHECK(error_of("confkv:high=63,recent=63").empty());
  CHECK(error_of("confkv:high=512,low=512").empty());
  CHECK(error_of("confkv:high=800,low=100").empty());
  check_refused("confkv:high=128+protect:recent=129", {"high=128", "recent=129"});
  check_refused("confkv-l:high=63", {"confkv-l", "high=63"});
  // Another policy's window is not hard: the row is flagged instead.
  CHECK(error_of("random:recent=64+confidence:high=32,low=128").empty());
}

TEST_CASE("protect overrides a policy's own protection, key by key") {
  const policy own = parse_policy("streaming:budget=9+protect:recent=3");
  CHECK(own.protect.sinks == 4);
  CHECK(own.protect.recent == 3);
  const policy none = parse_policy("streaming:budget=9+protect:sinks=0");
  CHECK(none.protect.sinks == 0);
  const policy h2o = parse_policy("h2o:budget=9+protect:sinks=2");
  CHECK(h2o.protect.heavy == 0.5);
  CHECK(parse_policy("h2o:budget=9+protect:recent=2").protect.heavy < 0);
}

TEST_CASE("needs") {
  const auto needs = [](std::string_view spec) { return parse_policy(spec).needs; };
  CHECK(!needs("full").mass);
  CHECK(needs("full").prompt_rows == 0);
  CHECK(!needs("random:budget=3").mass);
  CHECK(needs("h2o:budget=3").mass);
  CHECK(needs("h2o:budget=3").prompt_rows == -1);
  CHECK(!needs("h2o:budget=3").confidence);
  CHECK(needs("tova:budget=3").prompt_rows == 1);
  CHECK(needs("confkv:obs=16").prompt_rows == 16);
  CHECK(needs("confkv").mass);
  CHECK(needs("confkv").confidence);
  CHECK(!needs("confkv").full_logits);
  CHECK(!needs("confkv").future);
  CHECK(needs("confkv:temperature=2").full_logits);
  CHECK(needs("confkv:tau=q0.5").future);
  CHECK(needs("confkv:gate=shuffled").future);
  CHECK(needs("confkv:gate=shuffled").confidence);
  CHECK(needs("confkv:gate=inverted").confidence);
  CHECK(!needs("confkv:gate=random").confidence);
  CHECK(!needs("confkv:gate=constant,tau=q0.5").future);
  CHECK(needs("random+confidence:high=1,low=2").confidence);
  CHECK(!needs("h2o:budget=3").bytes_budget);
  CHECK(needs("h2o:budget=3MB").bytes_budget);
  CHECK(needs("confkv:low=3GB").bytes_budget);
}

}  // namespace
}  // namespace kvreplay::policies
