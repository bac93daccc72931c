// What a trace lacks is refused in one line that names it, by those who read it and by nobody else.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <fstream>

#include "replay/policy_sets.hpp"
#include "replay/test_support.hpp"
#include "replay/trace_copy.hpp"

namespace kvreplay::replay {
namespace {

struct expectation {
  const char* spec;
  // Refused without: k (keys and queries), c(onfidence), l(ogits), r(etention), n (value norms and
  // wo), s (image span), i(mage scores), p(rompt's queries), f(requencies of the rotary embedding).
  const char* refuses;
};

const std::vector<expectation> table{
    {"full", ""},
    {"window:budget=9", ""},
    {"streaming:budget=9", ""},
    {"random:budget=9", ""},
    {"h2o:budget=9", "p"},
    {"scissorhands:budget=9,history=50", "p"},
    {"tova:budget=9", ""},
    {"snapkv:budget=9,obs=4", "p"},
    {"snapkv:budget=9,obs=1", ""},
    {"pyramidkv:budget=9,obs=4", "p"},
    {"adakv:budget=9,obs=4", "p"},
    {"headkv:budget=9,obs=4,table={T}", "p"},
    {"rkv:budget=9,obs=1", "k"},
    {"rkv:budget=9,obs=3", "kp"},
    {"trimkv:budget=9", "r"},
    {"dbtrimkv:budget=9", "r"},
    {"confkv:high=8,low=20,recent=2,obs=1", "c"},
    {"confkv-l:high=8,low=20,recent=2,obs=1", "c"},
    {"confkv:high=8,low=20,recent=2,obs=1,temperature=2", "l"},
    {"oracle:budget=9", ""},
    {"knorm:budget=9", "k"},
    {"keydiff:budget=9", "k"},
    {"fastv:layer=1", "s"},
    {"visionzip:dominant=3", "si"},
    {"tova:budget=9+critical", "n"},
    {"random:budget=9+confidence:high=4,low=8", "c"},
    {"random:budget=9+int8", "k"},
    {"streaming:budget=9+rerotate", "kf"},
    {"window:budget=9+global", ""},
};

std::vector<std::string> specs_for(const std::string& heads) {
  std::vector<std::string> out;
  for (const auto& e : table) {
    std::string spec = e.spec;
    if (const auto at = spec.find("{T}"); at != std::string::npos) spec.replace(at, 3, heads);
    if (const auto at = spec.find("budget=9+confidence"); at != std::string::npos) {
      spec.replace(at, 19, "recent=1+confidence");
    }
    out.push_back(spec);
  }
  return out;
}

TEST_CASE("each policy on a trace that lacks each dataset in turn") {
  temporary_folder folder;
  auto made = options_for(trace_kind::grouped, 41);
  made.tokens = 60;
  made.retention = made.value_norm = made.wo = true;
  traces::synth(folder / "t.h5", made);
  const traces::reader trace(folder / "t.h5");
  std::ofstream(folder / "heads.json")
      << R"({"schema": "kvreplay.headscores/1", "scores": [[1,5,2,0,3,1],[4,4,1,9,0,2],[1,1,1,1,1,1]]})";
  const auto policies = parse_all(specs_for(folder / "heads.json"));
  const trace_copy whole{.logits = true, .image_span = true, .image_score = true, .rope = true};
  struct cut {
    char letter;
    const char* named;  // in the message
    trace_copy how;
  };
  const auto without = [&](auto change) {
    trace_copy how = whole;
    change(how);
    return how;
  };
  const std::vector<cut> cuts{
      {' ', "", whole},
      {'k', "dataset k", without([](auto& h) { h.keys = false, h.attention = true, h.wo = true; })},
      {'c', "confidence or logits", without([](auto& h) { h.confidence = h.logits = false; })},
      {'l', "needs logits", without([](auto& h) { h.logits = false; })},
      {'r', "dataset retention", without([](auto& h) { h.retention = false; })},
      {'n', "value_norm (or wo)", without([](auto& h) { h.value_norm = h.wo = false; })},
      {'s', "spans/image", without([](auto& h) { h.image_span = false; })},
      {'i', "dataset image_score", without([](auto& h) { h.image_score = false; })},
      {'p', "prompt's queries", without([](auto& h) { h.first_row = 39; })},
      {'f', "rope_inv_freq", without([](auto& h) { h.rope = false; })}};
  open_loop_options options;
  options.quality = false;
  for (const auto& c : cuts) {
    CAPTURE(c.letter);
    const auto path = folder / fmt::format("{}.h5", c.letter);
    copy_trace(trace, path, c.how);
    const traces::reader cut_trace(path);
    const auto lanes = replay_open(cut_trace, 0, policies, options);
    for (size_t i = 0; i < table.size(); ++i) {
      CAPTURE(policies[i].spec);
      const auto& row = lanes[i].row;
      CAPTURE(row.note);
      std::string refuses = table[i].refuses;
      // temperature asks for whole logits also where the recorded confidence is there.
      if (refuses == "l") refuses += "c";
      const bool refused = refuses.find(c.letter) != std::string::npos;
      CHECK((row.status == "failed") == refused);
      if (!refused) continue;
      const char* named =
          c.letter == 'c' && table[i].refuses == std::string("l") ? "needs logits" : c.named;
      CHECK(row.note.find(named) != std::string::npos);
      CHECK(row.note.find(path) == 0);
      CHECK(row.note.find(policies[i].name) != std::string::npos);
      CHECK(row.note.find("record") != std::string::npos);
      CHECK(row.note.find('\n') == std::string::npos);
    }
  }
}

// The rows hold 16-bit probabilities, so masses differ in the fourth digit and a near tie may turn.
TEST_CASE("attention alone serves those that need weights, with the same outcome") {
  temporary_folder folder;
  for (const auto kind : {trace_kind::grouped, trace_kind::windowed, trace_kind::sinks}) {
    traces::synth(folder / "t.h5", options_for(kind, 43));
    const traces::reader trace(folder / "t.h5");
    copy_trace(trace, folder / "attention.h5", {.keys = false, .attention = true});
    const traces::reader attention(folder / "attention.h5");
    const auto policies = parse_all(
        {"full", "window:budget=12", "streaming:budget=12", "random:budget=12", "h2o:budget=12",
         "tova:budget=12", "snapkv:budget=12,obs=4", "snapkv:budget=12,obs=4+every:n=1",
         "scissorhands:budget=12", "oracle:budget=12", "confkv:high=8,low=20,recent=2"});
    open_loop_options options;
    options.kept = true;
    const auto with = replay_open(trace, 0, policies, options);
    const auto alone = replay_open(attention, 0, policies, options);
    for (size_t i = 0; i < policies.size(); ++i) {
      CAPTURE(policies[i].spec);
      const auto& row = alone[i].row;
      REQUIRE_MESSAGE(row.status == "ok", row.note);
      CHECK(*row.quality.attention_recall ==
            doctest::Approx(*with[i].row.quality.attention_recall).epsilon(5e-3));
      CHECK(*row.quality.attention_recall <= *row.quality.recall_bound + 1e-6);
      CHECK(*row.memory.mean_bytes == *with[i].row.memory.mean_bytes);
      CHECK_FALSE(row.quality.output_rel_l2.has_value());
      CHECK(row.note.find("attention alone") != std::string::npos);
      if (i < 4) CHECK(kept_sets(attention, alone[i]) == kept_sets(trace, with[i]));
    }
    std::filesystem::remove(folder / "attention.h5");
  }
}

}  // namespace
}  // namespace kvreplay::replay
