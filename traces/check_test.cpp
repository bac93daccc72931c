#include "traces/check.hpp"

#include <cmath>

#include "traces/synth.hpp"
#include "traces/test_support.hpp"

namespace kvreplay::traces {

using namespace testing;

namespace {

synth_options everything() {
  synth_options o;
  o.layers = 2;
  o.head_dim = 8;
  o.value_dim = 5;
  o.prompt_length = 24;
  o.tokens = 40;
  o.hidden_size = 20;
  o.wo = o.value_norm = o.retention = o.residual = o.attention = true;
  return o;
}

struct checked {
  temp_folder folder;
  std::string path = folder / "check.h5";
  check_report report;

  checked(const synth_options& options, const std::function<void(hid_t)>& change) {
    synth(path, options);
    edit(path, change);
    report = check(reader(path), {.all = true});
  }
  // The first finding, or "ok".
  std::string first() const { return report.findings.empty() ? "ok" : report.findings[0].text; }
};

const std::string layer1 = "/sequences/0/layers/1/";

float read_float(hid_t file, const std::string& name, size_t index) {
  const hid_t data = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
  const hid_t space = H5Dget_space(data);
  std::vector<float> values(static_cast<size_t>(H5Sget_simple_extent_npoints(space)));
  REQUIRE(H5Dread(data, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) >= 0);
  H5Sclose(space);
  H5Dclose(data);
  return values.at(index);
}

}  // namespace

TEST_CASE("a changed o, lse, value_norm, confidence or probability is found by name and step") {
  const auto nudge = [](const std::string& name, size_t index, float by) {
    return checked(everything(),
                   [=](hid_t f) { poke<float>(f, name, index, read_float(f, name, index) + by); })
        .first();
  };
  CHECK(nudge(layer1 + "lse", 6 * 33 + 2, 0.0005f) == "ok");
  CHECK(nudge(layer1 + "lse", 6 * 33 + 2, 0.002f).find("layers/1/lse: step 33, head 2") !=
        std::string::npos);
  CHECK(nudge(layer1 + "lse", 2, -0.01f).find("layers/1/lse: step 0, head 2") != std::string::npos);
  CHECK(nudge(layer1 + "value_norm", 6 * 39 + 5, 0.1f).find("value_norm: step 39, head 5") !=
        std::string::npos);
  CHECK(nudge("/sequences/0/confidence", 4 * 3 + 0, 0.01f).find("confidence: step 26: entropy") !=
        std::string::npos);
  CHECK(nudge("/sequences/0/confidence", 4 * 3 + 1, 0.01f).find("step 26: margin") !=
        std::string::npos);
  CHECK(nudge("/sequences/0/confidence", 4 * 3 + 3, 0.01f).find("step 26: lse") !=
        std::string::npos);
  const checked o(everything(), [](hid_t f) {
    poke<half_bits>(f, layer1 + "o", (6 * 20 + 4) * 5 + 1, float_to_half(3.f));
  });
  check_message(o.first(), o.path, {"layers/1/o: step 20, head 4, channel 1", "expected"});
  CHECK(o.report.finding_count == 1);
  CHECK(o.report.max_o_error > 0.1);
}

TEST_CASE("a key changed after the fact breaks every row that sees it, not those before") {
  const checked k(everything(), [](hid_t f) {
    poke<half_bits>(f, layer1 + "k", (3 * 30 + 1) * 8, float_to_half(-9.f));
  });
  CHECK_FALSE(k.report.ok());
  CHECK(k.first().find("layers/1/lse: step 3") != std::string::npos);
  CHECK(k.report.findings.size() <= 20);
  CHECK(k.report.finding_count >= static_cast<std::int64_t>(k.report.findings.size()));
}

TEST_CASE("probability rows are held against q and k") {
  // Two entries swapped: the sum stays 1.
  const checked swapped(everything(), [](hid_t f) {
    const size_t row = (6 * 4 + 3) * 40;
    poke<half_bits>(f, layer1 + "attn", row + 0, float_to_half(0.75f));
    for (size_t i = 1; i < 29; ++i) poke<half_bits>(f, layer1 + "attn", row + i, 0);
    poke<half_bits>(f, layer1 + "attn", row + 5, float_to_half(0.25f));
  });
  check_message(swapped.first(), swapped.path, {"layers/1/attn: step 28, head 3", "from q and k"});
}

TEST_CASE("a row that sums to 0.93 needs a sink that explains it") {
  // One visible key with score 0: a sink logit of ln(0.07 / 0.93) takes 0.07.
  const float sink = std::log(0.07f / 0.93f);
  for (const bool declared : {false, true}) {
    for (const bool with_q : {false, true}) {
      const temp_folder folder;
      model_info m = small_model(1);
      m.n_q_heads = m.n_kv_heads = m.head_dim = m.value_dim = 1;
      m.softmax_scale = 1;
      m.cache_dtype = "float16";
      m.sinks = {declared ? sink : 0.f};
      if (!declared) m.sinks.clear();
      sequence_plan p = small_plan(1, 1);
      p.confidence = false;
      p.logit_pos.clear();
      p.q = with_q;
      p.o_float16 = false;
      p.attn_pos = {0};
      writer out(folder / "a.h5", m, "test");
      out.begin_sequence(p);
      const half_bits zero[1] = {0}, one[1] = {0x3c00}, row[1] = {float_to_half(0.93f)};
      out.put_tokens(0, std::vector<std::int32_t>{1});
      out.put_k(0, 0, one);
      out.put_v(0, 0, one);
      if (with_q) out.put_q(0, 0, zero);
      const float total = declared ? std::log(1 + std::exp(sink)) : 0.f;
      out.put_lse(0, 0, std::vector<float>{total});
      out.put_o(0, 0, std::vector<float>{declared ? 0.93f : 1.f});
      out.put_attention(0, 0, row);
      out.end_sequence();
      out.finish();
      const check_report report = check(reader(folder / "a.h5"), {.all = true});
      CAPTURE(declared);
      CAPTURE(with_q);
      CHECK(report.ok() == declared);
      if (!declared) CHECK(report.findings[0].text.find("sum to 0.93") != std::string::npos);
    }
  }
  // A declared sink that takes another share does not explain it.
  synth_options o = everything();
  o.learned_sinks = true;
  const checked other(o, [](hid_t f) { poke<float>(f, "/model/sinks", 6, 4.f); });
  CHECK(other.first().find("layers/1/lse") != std::string::npos);
}

TEST_CASE("traces of weights alone are checked by their rows") {
  const auto strip = [](hid_t f, int layer) {
    for (const char* name : {"q", "k", "v", "o", "lse", "value_norm"}) {
      const std::string path = "/sequences/0/layers/" + std::to_string(layer) + "/" + name;
      REQUIRE(H5Ldelete(f, path.c_str(), H5P_DEFAULT) >= 0);
    }
  };
  const checked good(everything(), [&](hid_t f) {
    strip(f, 0);
    strip(f, 1);
  });
  CHECK(good.first() == "ok");
  CHECK(good.report.values_checked > 0);
  CHECK(reader(good.path).fingerprint(0).size() == 16);
  const checked bad(everything(), [&](hid_t f) {
    strip(f, 0);
    strip(f, 1);
    poke<half_bits>(f, layer1 + "attn", 40 * 6 * 5 + 1, float_to_half(1.25f));
  });
  CHECK(bad.first().find("layers/1/attn: step 29, head 0") != std::string::npos);
}

TEST_CASE("first_row, column sums and samples") {
  const temp_folder folder;
  const std::string source = folder / "all.h5", path = folder / "tail.h5";
  synth_options o = everything();
  o.wo = o.value_norm = o.attention = o.residual = o.retention = false;
  synth(source, o);
  const reader full(source);
  // The same trace with q, o, lse from row 20 on and the prompt's column sums from the full rows.
  const auto copy = [&](bool spoil, std::int64_t first_row) {
    sequence_plan p;
    p.n_prompt = 24;
    p.n_tokens = 40;
    p.first_row = first_row;
    p.column_sum = true;
    writer out(path, full.model(), "test");
    out.begin_sequence(p);
    out.put_tokens(0, full.tokens(0));
    for (int layer = 0; layer < 2; ++layer) {
      const layer_slice s = full.read_layer(0, layer, 0, 40);
      const auto from = static_cast<size_t>(first_row);
      out.put_k(layer, 0, s.k);
      out.put_v(layer, 0, s.v);
      out.put_q(layer, first_row, std::span(s.q).subspan(from * 6 * 8));
      out.put_o(layer, first_row, std::span(s.o).subspan(from * 6 * 5));
      out.put_lse(layer, first_row, std::span(s.lse).subspan(from * 6));
      std::vector<float> sums(6 * 24, 0);
      for (size_t h = 0; h < 6; ++h) {
        for (size_t t = 0; t < 24; ++t) {
          for (size_t i = 0; i <= t; ++i) {
            double score = 0;
            for (size_t c = 0; c < 8; ++c) {
              score += static_cast<double>(half_to_float(s.q[(t * 6 + h) * 8 + c])) *
                       static_cast<double>(half_to_float(s.k[(i * 3 + h / 2) * 8 + c]));
            }
            const double lse = static_cast<double>(s.lse[t * 6 + h]);
            sums[h * 24 + i] +=
                static_cast<float>(std::exp(score * full.model().softmax_scale - lse));
          }
        }
      }
      if (spoil && layer == 1) {
        sums[24 + 3] += 0.01f;
        sums[24 + 4] -= 0.01f;
      }
      out.put_column_sum(layer, sums);
    }
    out.end_sequence();
    out.finish();
    return check(reader(path), {.all = true});
  };
  CHECK(copy(false, 20).ok());
  CHECK(copy(false, 20).rows_checked == 2 * 20);
  CHECK(copy(false, 0).ok());
  const check_report spoiled = copy(true, 0);
  REQUIRE_FALSE(spoiled.ok());
  CHECK(spoiled.findings[0].text.find("layers/1/column_sum: head 1, step 3") != std::string::npos);

  int calls = 0;
  double last = 0;
  const check_report sampled = check(full, {.sample_rows = 5, .progress = [&](double share) {
                                              ++calls;
                                              CHECK(share > last);
                                              last = share;
                                            }});
  CHECK(sampled.ok());
  CHECK(sampled.rows_checked == 2 * 5);
  CHECK(calls == 2);
  CHECK(last == 1.0);
}

TEST_CASE("without cache_dtype float16 the tolerance covers rounded q, k and v") {
  // lse moves by less than e = 2^-10 * scale * max sum |q k|, which is about 0.006 here.
  const auto moved = [](float by, bool exact) {
    return checked(everything(),
                   [=](hid_t f) {
                     if (!exact) H5Adelete_by_name(f, "/model", "cache_dtype", H5P_DEFAULT);
                     const size_t at = 6 * 33 + 2;
                     poke<float>(f, layer1 + "lse", at, read_float(f, layer1 + "lse", at) + by);
                   })
        .report.ok();
  };
  CHECK_FALSE(moved(0.0015f, true));
  CHECK(moved(0.0015f, false));
  CHECK_FALSE(moved(0.1f, false));
}

// q and k of 256 in 128 channels: raw scores of 8.4 million, as real models have them. A 32-bit lse
// holds the sum to 0.06 only.
TEST_CASE("scores beyond 16 bits are attention, and lse is judged by what FP32 can hold") {
  const auto moved = [](float by) {
    temp_folder folder;
    model_info m = small_model(1);
    m.n_q_heads = m.n_kv_heads = 1;
    m.head_dim = 128;
    m.softmax_scale = 1 / std::sqrt(128.0);
    m.cache_dtype = "float16";
    sequence_plan plan = small_plan(1, 2);
    plan.confidence = false;
    plan.logit_pos.clear();
    const auto path = folder / "large.h5";
    {
      writer out(path, m, "test");
      out.begin_sequence(plan);
      out.put_tokens(0, std::vector<std::int32_t>{1, 2});
      const std::vector<half_bits> rows(2 * 128, float_to_half(256.F));
      out.put_q(0, 0, rows);
      out.put_k(0, 0, rows);
      out.put_v(0, 0, std::vector<half_bits>(2 * 2, float_to_half(1.F)));
      out.put_o(0, 0, std::vector<float>(2 * 2, 1.F));
      const double score = 256.0 * 256 * 128 / std::sqrt(128.0);
      out.put_lse(0, 0,
                  std::vector<float>{static_cast<float>(score),
                                     static_cast<float>(score + std::log(2.0)) + by});
      out.commit(2);
      out.end_sequence();
      out.finish();
    }
    return check(reader(path), {.all = true}).ok();
  };
  CHECK(moved(0));
  CHECK(moved(0.25F));
  CHECK_FALSE(moved(2));
}

}  // namespace kvreplay::traces
