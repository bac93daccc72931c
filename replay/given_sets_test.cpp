// Sets from a file, images, rotary positions inside the cache, TrimKV's and CriticalKV's own facts.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cmath>
#include <fstream>

#include "kernels/reference.hpp"
#include "replay/policy_files.hpp"
#include "replay/policy_sets.hpp"
#include "replay/replay_layer.hpp"
#include "replay/test_support.hpp"
#include "replay/trace_copy.hpp"
#include "reports/csv.hpp"

namespace kvreplay::replay {
namespace {

lane_output run_one(const traces::reader& trace, const std::string& spec) {
  const auto policy = policies::parse_policy(spec);
  open_loop_options options;
  options.kept = true;
  return replay_open(trace, 0, {&policy, 1}, options)[0];
}

void write_kept(const traces::reader& trace, const lane_output& lane, const std::string& path) {
  std::ofstream out(path);
  out << reports::kept_header;
  for (const auto& [key, positions] : kept_sets(trace, lane)) {
    const auto [step, layer, head] = key;
    reports::write_row(
        out, {{lane.row.trace, lane.row.policy, "open", 0}, step, layer, head, positions});
  }
}

TEST_CASE("kept replays what a policy wrote, to the last number") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::windowed, 51));
  const traces::reader trace(folder / "t.h5");
  const auto original = run_one(trace, "h2o:budget=9");
  write_kept(trace, original, folder / "a,b.csv");
  const auto again = run_one(trace, "kept:file=" + (folder / "a%2Cb.csv"));
  REQUIRE_MESSAGE(again.row.status == "ok", again.row.note);
  CHECK(kept_sets(trace, again) == kept_sets(trace, original));
  CHECK(*again.row.quality.output_rel_l2 == *original.row.quality.output_rel_l2);
  CHECK(*again.row.memory.mean_bytes == *original.row.memory.mean_bytes);
  const auto stored =
      run_one(trace, "kept:file=" + (folder / "a%2Cb.csv") + "+int8:window=1,scales=token");
  CHECK(stored.row.status == "ok");
  CHECK(*stored.row.memory.mean_bytes < *original.row.memory.mean_bytes);
}

TEST_CASE("kept refuses what cannot be: entries that come back, several policies, broken files") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::one_layer, 51));
  const traces::reader trace(folder / "t.h5");
  const std::string header(reports::kept_header);
  const auto refused = [&](const std::string& text) {
    std::ofstream(folder / "k.csv") << text;
    const auto row = run_one(trace, "kept:file=" + (folder / "k.csv")).row;
    CHECK(row.status == "failed");
    CHECK(row.note.find('\n') == std::string::npos);
    return row.note;
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(has(refused(header + "t,p,open,0,39,0,0,1 2 3\nt,p,open,0,40,0,0,2 4 40\n"),
            "step 40, layer 0, KV head 0: position 4 is not held"));
  CHECK(
      has(refused(header + "t,p,open,0,39,0,0,1\nt,q,open,0,40,0,0,1\n"), "record 3: policy 'q'"));
  CHECK(has(refused(header + "t,p,open,0,39,0,0,1\nt,p,open,0,39,0,0,1\n"), "is there twice"));
  CHECK(has(refused(header + "t,p,open,0,39,0,0,3 2\n"), "do not ascend"));
  CHECK(has(refused(header + "t,p,open,0,39,0,0,-3\n"), "not a whole number"));
  CHECK(has(refused(header + "t,p,open,0,39,0,0\n"), "7 fields, expected 8"));
  CHECK(has(refused(header + "t,p,open,1,39,0,0,1\n"), "no sets of sequence 0"));
  CHECK(has(refused("step,layer\n"), "expected the first line"));
  CHECK(has(run_one(trace, "kept:file=" + (folder / "none.csv")).row.note, "cannot be read"));
  // A step without a row evicts nothing; an empty set is one.
  std::ofstream(folder / "k.csv") << header
                                  << "\"t,\"\"1\",p,open,0,39,0,0,5\nt,p,open,0,39,0,1,\n";
  const auto sparse = run_one(trace, "kept:file=" + (folder / "k.csv"));
  REQUIRE_MESSAGE(sparse.row.status == "ok", sparse.row.note);
  CHECK(kept_sets(trace, sparse).at({41, 0, 0}) == std::vector<std::int32_t>{5, 40, 41});
  CHECK(kept_sets(trace, sparse).at({40, 0, 1}) == std::vector<std::int32_t>{40});
}

TEST_CASE("head tables that do not fit are refused by name") {
  temporary_folder folder;
  const auto refused = [&](const std::string& text) -> std::string {
    std::ofstream(folder / "h.json") << text;
    try {
      read_head_table(folder / "h.json", 1, 4, 2);
    } catch (const traces::trace_error& e) {
      return e.what();
    }
    return "";
  };
  const std::string open = R"({"schema": "kvreplay.headscores/1", "scores": )";
  CHECK(refused("nonsense").find("not a table") != std::string::npos);
  CHECK(refused(R"({"scores": [[1,1,1,1]]})").find("not a table") != std::string::npos);
  CHECK(refused(open + "[[1,1,1,1],[1,1,1,1]]}").find("the model has 1") != std::string::npos);
  CHECK(refused(open + "[[1,1,1]]}").find("layer 0") != std::string::npos);
  CHECK(refused(open + "[[1,1,-1,1]]}").find("query head 2") != std::string::npos);
  CHECK(refused(open + "[[0,0,0,0]]}").find("all scores are 0") != std::string::npos);
  CHECK(refused(open + "[[1,2,4,1]]}").empty());
  CHECK(read_head_table(folder / "h.json", 1, 4, 2) == std::vector<double>{0.375, 0.625});
}

// Image at positions 5 .. 24: FastV drops half of it from layer 1 on, VisionZip keeps three.
TEST_CASE("images: the worst tokens leave after the prompt, the rest stays for good") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 52));
  copy_trace(traces::reader(folder / "t.h5"), folder / "i.h5",
             {.image_span = true, .image_score = true});
  const traces::reader trace(folder / "i.h5");
  const auto zip = run_one(trace, "visionzip:dominant=3"),
             fast = run_one(trace, "fastv:layer=1,ratio=0.5");
  REQUIRE_MESSAGE(zip.row.status == "ok", zip.row.note);
  REQUIRE_MESSAGE(fast.row.status == "ok", fast.row.note);
  CHECK(zip.row.note.find("merged") != std::string::npos);
  CHECK(fast.row.note.find("after the prompt pass") != std::string::npos);
  std::vector<std::int32_t> others;
  for (std::int32_t p = 0; p < 40; ++p) {
    if (p < 5 || p > 24) others.push_back(p);
  }
  auto expected = others;
  expected.insert(expected.begin() + 5, {6, 14, 17});  // 7 p mod 11 is 10 at 14, 9 at 6 and 17
  CHECK(kept_sets(trace, zip).at({39, 0, 1}) == expected);
  CHECK(kept_sets(trace, zip).at({39, 2, 0}) == expected);
  CHECK(kept_sets(trace, zip).at({60, 2, 0}).size() == expected.size() + 21);
  CHECK(kept_sets(trace, fast).at({39, 0, 0}).size() == 40);
  const auto upper = kept_sets(trace, fast).at({39, 1, 0});
  CHECK(upper.size() == 30);
  CHECK(upper == kept_sets(trace, fast).at({39, 2, 1}));
  CHECK(std::includes(upper.begin(), upper.end(), others.begin(), others.end()));
  // Ranked by the last prompt row of layer 0, mean over the query heads.
  const int layer = 0;
  const auto shape = cache_shape_for(trace.model(), {&layer, 1});
  const auto data = load_layer(trace, 0, 0);
  std::vector<float> rows(static_cast<size_t>(6 * 40)), mean;
  full_rows_of(shape, data, 39, 1, 40, rows.data());
  float worst_kept = 1, best_left = 0;
  for (std::int32_t p = 5; p < 25; ++p) {
    float sum = 0;
    for (size_t h = 0; h < 6; ++h) sum += rows[h * 40 + static_cast<size_t>(p)];
    const bool kept = std::binary_search(upper.begin(), upper.end(), p);
    (kept ? worst_kept : best_left) = kept ? std::min(worst_kept, sum) : std::max(best_left, sum);
  }
  CHECK(worst_kept >= best_left);
}

// A selection after the prompt alone, and less room than the observation window takes.
TEST_CASE("what the prompt's selection could not hold is said in the row") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 56));
  const traces::reader trace(folder / "t.h5");
  const auto tight = run_one(trace, "snapkv:budget=3,obs=4");
  CHECK(tight.row.note.find("degenerate: protected >= budget") != std::string::npos);
  CHECK(kept_sets(trace, tight).at({39, 1, 1}) == std::vector<std::int32_t>{37, 38, 39});
  CHECK(run_one(trace, "snapkv:budget=4,obs=4").row.note.find("degenerate") == std::string::npos);
}

// log beta (-.001, -.2, -.02, -.1, -.5) at t = 4, keep 3: offset 2 keeps {0, 2, 3}, offset 0 {0, 2,
// 4}.
TEST_CASE("TrimKV's own example") {
  temporary_folder folder;
  traces::model_info model;
  model.name = model.architecture = "test";
  model.n_layers = model.n_q_heads = model.n_kv_heads = 1;
  model.head_dim = model.value_dim = model.hidden_size = 2;
  model.vocab_size = model.logit_size = 4;
  model.layers = model.window = {0};
  traces::writer out(folder / "t.h5", model, "test");
  traces::sequence_plan plan;
  plan.n_prompt = 5;
  plan.n_tokens = 6;
  plan.o = plan.lse = false;
  plan.retention = true;
  out.begin_sequence(plan);
  out.put_tokens(0, std::vector<std::int32_t>(6, 1));
  const std::vector<traces::half_bits> ones(12, kernels::float_to_half(1));
  out.put_q(0, 0, ones);
  out.put_k(0, 0, ones);
  out.put_v(0, 0, ones);
  out.put_retention(0, 0, std::vector<float>{-.001F, -.2F, -.02F, -.1F, -.5F, -.1F});
  out.commit(6);
  out.end_sequence();
  out.finish();
  const traces::reader trace(folder / "t.h5");
  using positions = std::vector<std::int32_t>;
  CHECK(kept_sets(trace, run_one(trace, "trimkv:budget=3,age_offset=2")).at({4, 0, 0}) ==
        positions{0, 2, 3});
  CHECK(kept_sets(trace, run_one(trace, "trimkv:budget=3")).at({4, 0, 0}) == positions{0, 2, 4});
  CHECK(kept_sets(trace, run_one(trace, "trimkv:budget=3,score=exp")).at({4, 0, 0}) ==
        positions{0, 2, 4});
}

TEST_CASE("in-cache positions change attention once something has left, and only then") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 53));
  copy_trace(traces::reader(folder / "t.h5"), folder / "r.h5", {.rope = true});
  const traces::reader trace(folder / "r.h5");
  const auto plain = run_one(trace, "window:budget=12").row;
  const auto same = run_one(trace, "window:budget=12+rerotate").row;  // no gaps
  CHECK(*same.quality.output_rel_l2 == *plain.quality.output_rel_l2);
  const auto text = run_one(trace, "streaming:budget=12").row;
  const auto cache = run_one(trace, "streaming:budget=12+rerotate").row;
  CHECK(*cache.quality.output_rel_l2 != *text.quality.output_rel_l2);
  CHECK(*cache.quality.attention_recall == *text.quality.attention_recall);
  open_loop_options cheap;
  cheap.bound = false;
  const auto policy = policies::parse_policy("streaming:budget=12+rerotate");
  CHECK(*replay_open(trace, 0, {&policy, 1}, cheap)[0].row.quality.attention_recall ==
        doctest::Approx(*text.quality.attention_recall).epsilon(1e-5));
}

// Per query head, ||o - o^||_1 through W_O <= C - (2 - 1 / (sigma + p_sink)) * sum over what is
// kept of A ||v W_O||_1, C the sum over all (CriticalKV, theorem 1). Everything in double from the
// kept sets.
TEST_CASE("CriticalKV's bound holds for what any policy keeps") {
  temporary_folder folder;
  auto made = options_for(trace_kind::sinks, 54);
  made.layers = 1;
  made.value_norm = made.wo = true;
  traces::synth(folder / "t.h5", made);
  const traces::reader trace(folder / "t.h5");
  const auto& m = trace.model();
  const int layer = 0;
  const auto shape = cache_shape_for(m, {&layer, 1});
  const auto data = load_layer(trace, 0, layer, true);
  const auto wo = trace.wo(layer);
  for (const char* spec : {"snapkv:budget=12,obs=4+critical+every:n=1", "h2o:budget=9",
                           "window:budget=9", "h2o:budget=40+critical"}) {
    CAPTURE(spec);
    const auto policy = policies::parse_policy(spec);
    lane state(policy, dims_for(m), shape, {0}, data.n_prompt, {});
    prompt_observations prompt(shape, data);
    const auto inputs = inputs_of(data);
    load_prompt(state, 0, data, prompt, inputs);
    int checked = 0;
    const auto observe = [&](std::int64_t t, const float* o, const float*, const step_events&) {
      std::vector<float> rows(static_cast<size_t>(m.n_q_heads * (t + 1)));
      full_rows_of(shape, data, t, 1, t + 1, rows.data());
      for (int h = 0; h < m.n_q_heads; ++h) {
        const float* a = &rows[static_cast<size_t>(h * (t + 1))];
        const auto norm = [&](std::int64_t i) {
          return static_cast<double>(inputs.value_norm[static_cast<size_t>(i * m.n_q_heads + h)]);
        };
        double all = 0, kept = 0, sigma = 0, total = 0;
        for (std::int64_t i = 0; i <= t; ++i) {
          all += a[i] * norm(i);
          total += a[i];
        }
        for (const auto i : state.cache().positions(0, h / m.group())) {
          kept += a[i] * norm(i);
          sigma += a[i];
        }
        double actual = 0;
        for (int j = 0; j < m.hidden_size; ++j) {
          double sum = 0;
          for (int c = 0; c < m.value_dim; ++c) {
            const auto at = static_cast<size_t>(h * m.value_dim + c);
            const double full = data.o[static_cast<size_t>(t * data.o_width) + at];
            sum += (o[at] - full) *
                   wo[at * static_cast<size_t>(m.hidden_size) + static_cast<size_t>(j)];
          }
          actual += std::fabs(sum);
        }
        // 16-bit o in the trace: 2^-11 of it a channel.
        const double rounding = 2e-3 * all;
        CHECK(actual <= all - (2 - 1 / (sigma + 1 - total)) * kept + 1e-5 + rounding);
        ++checked;
      }
    };
    std::vector<float> o(static_cast<size_t>(data.o_width * 56));
    std::vector<step_events> events(56);
    layer_block block{data.n_prompt, 56,       data.q_at(40), data.k_at(40),
                      data.v_at(40), o.data(), &inputs};
    replay_layer(state, 0, block, events, observe);
    CHECK(checked == 56 * 6);
  }
}

TEST_CASE("critical's columns: what its rows say beside the base") {
  temporary_folder folder;
  auto made = options_for(trace_kind::grouped, 55);
  made.value_norm = made.wo = true;
  traces::synth(folder / "t.h5", made);
  const traces::reader trace(folder / "t.h5");
  const auto policies = parse_all({"snapkv:budget=12,obs=4+critical", "snapkv:budget=12,obs=4",
                                   "snapkv:budget=12,obs=4+critical:first=1",
                                   "snapkv:budget=12,obs=4+critical:first=0"});
  open_loop_options options;
  options.per_head = true;
  const auto lanes = replay_open(trace, 0, policies, options);
  const auto alone = replay_open(trace, 0, {&policies[0], 1}, options);
  REQUIRE(alone.size() == 1);
  const auto& with = lanes[0].row.quality;
  CHECK(*alone[0].row.quality.heads_improved == *with.heads_improved);
  CHECK(*alone[0].row.quality.head_l1 == *with.head_l1);
  CHECK_FALSE(lanes[1].row.quality.heads_improved.has_value());
  CHECK_FALSE(lanes[1].row.quality.sigma_over_half.has_value());
  // first=1 is the base itself: no head's loss falls. first=0: no first stage holds anything.
  CHECK(*lanes[2].row.quality.heads_improved == 0);
  CHECK(*lanes[2].row.quality.head_l1 == *lanes[1].row.quality.head_l1);
  CHECK(*lanes[3].row.quality.sigma_over_half == 0);
  CHECK(*with.sigma_over_half >= 0);
  double sum = 0;
  for (const auto& head : lanes[0].heads)
    sum += *head.head_l1 / static_cast<double>(lanes[0].heads.size());
  CHECK(sum == doctest::Approx(*with.head_l1).epsilon(1e-9));
  // Value norms are the same numbers whether they are recorded or come from wo.
  copy_trace(trace, folder / "wo.h5", {.value_norm = false});
  const traces::reader computed(folder / "wo.h5");
  CHECK(*replay_open(computed, 0, {&policies[0], 1}, {})[0].row.memory.mean_bytes ==
        *lanes[0].row.memory.mean_bytes);
  const auto recorded = load_layer(trace, 0, 1, true), from_wo = load_layer(computed, 0, 1, true);
  for (size_t i = 0; i < recorded.value_norm.size(); ++i) {
    CHECK(from_wo.value_norm[i] == doctest::Approx(recorded.value_norm[i]).epsilon(1e-5));
  }
}

}  // namespace
}  // namespace kvreplay::replay
