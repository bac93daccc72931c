// Values that break a rule: refused at the read, in one line that names dataset, layer and step.
#include <cmath>
#include <limits>

#include "traces/check.hpp"
#include "traces/test_support.hpp"

namespace kvreplay::traces {

using namespace testing;

namespace {

const std::string layer1 = "/sequences/0/layers/1/";
constexpr float inf = std::numeric_limits<float>::infinity();

struct edited_trace {
  temp_folder folder;
  std::string path = folder / "data.h5";
  explicit edited_trace(const std::function<void(hid_t)>& change, bool logits = false) {
    const model_info m = small_model();
    sequence_plan p = small_plan();
    p.logits = logits;
    writer out(path, m, "test");
    out.begin_sequence(p);
    put_steps(out, m, p, 0, 7);
    if (logits) out.put_logits(0, float_rows(0, 4, 17));
    out.end_sequence();
    out.finish();
    edit(path, change);
  }
  std::string layer_error() const {
    return error_of([&] { reader(path).read_layer(0, 1, 0, 7); });
  }
  std::string logit_error() const {
    return error_of([&] { reader(path).logits(0, 0, 4); });
  }
};

}  // namespace

TEST_CASE("NaN and infinities are named by dataset and step") {
  for (const half_bits bad : std::initializer_list<half_bits>{0x7e00, 0x7c00, 0xfc00, 0x7c01}) {
    const edited_trace t([&](hid_t f) { poke<std::uint16_t>(f, layer1 + "k", 15 * 5 + 3, bad); });
    check_message(t.layer_error(), t.path, {"sequences/0/layers/1/k", "step 5", "1 of 15"});
    CHECK(error_of([&] { reader(t.path).read_layer(0, 1, 0, 5); }) == "no error");
    CHECK(error_of([&] { reader(t.path).read_layer(0, 0, 0, 7); }) == "no error");
  }
  const edited_trace q([](hid_t f) { poke<std::uint16_t>(f, layer1 + "q", 30 * 6, 0x7e00); });
  check_message(q.layer_error(), q.path, {"layers/1/q", "step 6"});
  const edited_trace lse([](hid_t f) { poke<float>(f, layer1 + "lse", 6 * 2 + 1, -inf); });
  check_message(lse.layer_error(), lse.path, {"layers/1/lse", "step 2"});
  const edited_trace o([](hid_t f) { poke<std::uint16_t>(f, layer1 + "o", 12 * 3, 0xfc00); });
  check_message(o.layer_error(), o.path, {"layers/1/o", "step 3"});
}

TEST_CASE("a step whose q, k and v are zero was not recorded") {
  const auto clear = [](hid_t f, const std::string& name, size_t width, size_t step) {
    for (size_t i = 0; i < width; ++i) poke<std::uint16_t>(f, name, step * width + i, 0x8000);
  };
  const edited_trace all([&](hid_t f) {
    clear(f, layer1 + "q", 30, 6);
    clear(f, layer1 + "k", 15, 6);
    clear(f, layer1 + "v", 6, 6);
  });
  check_message(all.layer_error(), all.path, {"layers/1", "step 6", "all zero"});
  const edited_trace two([&](hid_t f) {
    clear(f, layer1 + "k", 15, 6);
    clear(f, layer1 + "v", 6, 6);
  });
  CHECK(two.layer_error() == "no error");
}

TEST_CASE("logits may hold -inf, but not only, and neither NaN nor +inf") {
  const auto changed = [](size_t index, float value) {
    return edited_trace([=](hid_t f) { poke<float>(f, "/sequences/0/logits", index, value); }, true)
        .logit_error();
  };
  CHECK(changed(17 + 3, -inf) == "no error");
  CHECK(changed(17 + 3, inf).find("sequences/0/logits: step 4: 1 of 17 logits") !=
        std::string::npos);
  CHECK(changed(17 + 3, NAN).find("step 4") != std::string::npos);
  // Padding beyond the 13 real ids does not save a row.
  const edited_trace none(
      [](hid_t f) {
        for (size_t i = 0; i < 13; ++i) poke<float>(f, "/sequences/0/logits", 34 + i, -inf);
      },
      true);
  check_message(none.logit_error(), none.path,
                {"sequences/0/logits", "step 5", "all logits are -inf"});
}

TEST_CASE("confidence, tokens and retention are checked") {
  const auto confidence = [](size_t column, float value) {
    const edited_trace t(
        [=](hid_t f) { poke<float>(f, "/sequences/0/confidence", 4 + column, value); });
    return error_of([&] { reader(t.path).confidence(0); });
  };
  CHECK(confidence(1, inf) == "no error");
  CHECK(confidence(1, -inf).find("sequences/0/confidence: step 4") != std::string::npos);
  CHECK(confidence(0, inf).find("step 4") != std::string::npos);
  CHECK(confidence(2, 1.5f).find("top in (0, 1]") != std::string::npos);
  CHECK(confidence(3, NAN).find("step 4") != std::string::npos);
  const edited_trace token([](hid_t f) { poke<std::int32_t>(f, "/sequences/0/tokens", 5, -1); });
  check_message(error_of([&] { reader(token.path).tokens(0); }), token.path,
                {"sequences/0/tokens", "step 5", "token -1"});
  const edited_trace retention([](hid_t f) {
    std::vector<float> values(21, -0.5f);
    values[10] = 0.5f;
    make_dataset(f, layer1 + "retention", {7, 3}, H5T_NATIVE_FLOAT, values.data());
  });
  check_message(retention.layer_error(), retention.path, {"layers/1/retention", "step 3", "<= 0"});
}

TEST_CASE("check counts what the reader refuses") {
  // In layer 0, which is checked first: the small trace's o and lse follow from nothing.
  const std::string layer0 = "/sequences/0/layers/0/";
  const edited_trace t([&](hid_t f) {
    poke<std::uint16_t>(f, layer0 + "k", 15 * 2, 0x7e00);
    poke<std::uint16_t>(f, layer0 + "k", 15 * 2 + 1, 0x7e00);
    poke<float>(f, layer0 + "lse", 6 * 4, -inf);
  });
  const check_report report = check(reader(t.path), {.all = true});
  CHECK_FALSE(report.ok());
  CHECK(report.nonfinite_values == 3);
  bool named = false;
  for (const check_finding& finding : report.findings) {
    named = named || finding.text.find("layers/0/k: step 2: 2 of 15") != std::string::npos;
  }
  CHECK(named);
}

TEST_CASE("attention rows are tested when they are read") {
  // Two heads over four positions; the row stands at position 2.
  const auto row_error = [](const std::vector<float>& row, bool sinks) {
    const temp_folder folder;
    model_info m = small_model(1);
    m.n_q_heads = 2;
    m.n_kv_heads = 1;
    if (sinks) m.sinks = {0.f, 0.f};
    sequence_plan p = small_plan(3, 4);
    p.attn_pos = {2};
    writer out(folder / "a.h5", m, "test");
    out.begin_sequence(p);
    put_steps(out, m, p, 0, 4);
    std::vector<half_bits> halves;
    for (const float x : row) halves.push_back(float_to_half(x));
    out.put_attention(0, 0, halves);
    out.end_sequence();
    out.finish();
    return error_of([&] { reader(folder / "a.h5").attention_row(0, 0, 0); });
  };
  const float third = 1.0f / 3;
  CHECK(row_error({0.5f, 0.25f, 0.25f, 0, third, third, third, 0}, false) == "no error");
  CHECK(row_error({0.5f, 0.25f, 0.18f, 0, 0.5f, 0.25f, 0.25f, 0}, false)
            .find("attn: step 2, head 0: probabilities sum to 0.93") != std::string::npos);
  CHECK(row_error({0.5f, 0.25f, 0.18f, 0, 0.5f, 0.25f, 0.25f, 0}, true) == "no error");
  CHECK(row_error({0, 0, 0, 0, 1, 0, 0, 0}, true).find("sum to 0") != std::string::npos);
  CHECK(row_error({0.5f, 0.25f, 0, 0.25f, 1, 0, 0, 0}, false).find("past the row's position") !=
        std::string::npos);
  CHECK(row_error({1.5f, -0.5f, 0, 0, 1, 0, 0, 0}, false).find("probability -0.5") !=
        std::string::npos);
  CHECK(row_error({0.3f, 1.2f, 2.5f, -1, 1, 0, 0, 0}, false).find("head 0") != std::string::npos);
}

}  // namespace kvreplay::traces
