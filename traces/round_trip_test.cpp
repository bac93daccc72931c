#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "traces/test_support.hpp"

namespace kvreplay::traces {

using namespace testing;

namespace {

struct full_trace {
  model_info model = small_model(3);
  sequence_plan plan = small_plan(4, 7);
  std::vector<float> wo = float_rows(0, 6, 2 * 11);
  std::vector<half_bits> attention;

  full_trace() {
    model.layers = {0, 2};
    model.window = {0, 3, 5};
    model.sinks = float_rows(0, 3, 6);
    model.rope = "half";
    model.rope_dim = 4;
    model.rope_inv_freq = {1.0, 0.1};
    model.rope_inv_freq_rows = 1;
    model.compute_dtype = "bfloat16";
    model.cache_dtype = "float16";
    model.model_fingerprint = "0123456789abcdef";
    plan.name = "first";
    plan.task = "recall";
    plan.temperature = 0.5;
    plan.seed = -3;
    plan.logits = plan.confidence = plan.residual_final = true;
    plan.value_norm = plan.residual_norm = plan.retention = plan.column_sum = true;
    plan.attn_pos = {4, 6};
    plan.chunks = {{0, 4}};
    plan.spans = {{"needle", {{1, 3}}}, {"empty", {}}};
    attention.assign(6 * 7, 0);
    for (size_t h = 0; h < 6; ++h) attention[h * 7] = float_to_half(0.5f);  // sums to 1 - p(sink)
  }

  std::vector<float> retention() const {
    std::vector<float> rows = float_rows(0, 7, 3);
    for (float& x : rows) x = -x;
    return rows;
  }

  void write(const std::string& path) const {
    writer out(path, model, "kvreplay test");
    out.put_wo(2, wo);
    out.begin_sequence(plan);
    put_steps(out, model, plan, 0, 7);
    for (const int layer : model.layers) {
      out.put_value_norm(layer, 0, float_rows(0, 7, 6));
      out.put_residual_norm(layer, 0, float_rows(0, 7, 1));
      out.put_retention(layer, 0, retention());
      out.put_column_sum(layer, float_rows(0, 6, 4));
      out.put_attention(layer, 0, attention);
      out.put_attention(layer, 1, attention);
    }
    std::vector<float> logits = float_rows(0, 4, 17);
    logits[5] = -std::numeric_limits<float>::infinity();
    out.put_logits(0, logits);
    std::vector<float> confidence(16, 0.5f);
    confidence[1] = std::numeric_limits<float>::infinity();  // the margin alone may be
    out.put_confidence(0, confidence);
    out.put_residual_final(0, float_rows(0, 4, 11));
    out.end_sequence();
    out.finish();
  }
};

}  // namespace

TEST_CASE("header and attributes come back as written") {
  const temp_folder folder;
  const full_trace want;
  want.write(folder / "full.h5");
  const reader file(folder / "full.h5");
  const model_info& m = file.model();
  CHECK(file.complete());
  CHECK(file.producer() == "kvreplay test");
  CHECK(file.created().size() == 20);
  CHECK(m.name == "small");
  CHECK(m.layers == std::vector<int>{0, 2});
  CHECK_FALSE(m.records_all_layers());
  CHECK(m.window == want.model.window);
  CHECK(m.sinks == want.model.sinks);
  CHECK(m.rope == "half");
  CHECK(m.rope_dim == 4);
  CHECK(m.rope_inv_freq == want.model.rope_inv_freq);
  CHECK(m.cache_dtype == "float16");
  CHECK(m.compute_dtype == "bfloat16");
  CHECK(m.model_fingerprint == "0123456789abcdef");
  CHECK(m.wo_layers == std::vector<int>{2});
  const sequence_info& s = file.sequence(0);
  CHECK(s.n_prompt == 4);
  CHECK(s.n_tokens == 7);
  CHECK(s.committed == 7);
  CHECK(s.name == "first");
  CHECK(s.task == "recall");
  CHECK(s.source == "real");
  CHECK(s.temperature == 0.5);
  CHECK(s.seed == -3);
  CHECK(s.logit_pos == std::vector<std::int32_t>{3, 4, 5, 6});
  CHECK(s.chunks == std::vector<std::pair<int, int>>{{0, 4}});
  CHECK(s.spans.at("needle") == std::vector<std::pair<int, int>>{{1, 3}});
  CHECK(s.spans.at("empty").empty());
  CHECK_FALSE(std::filesystem::exists(folder / "full.h5.part"));
}

TEST_CASE("every dataset comes back as written") {
  const temp_folder folder;
  const full_trace want;
  want.write(folder / "full.h5");
  const reader file(folder / "full.h5");
  for (const int layer : {0, 2}) {
    const layer_info& info = file.layer(0, layer);
    CHECK((info.has_q && info.has_k && info.has_v && info.has_o && info.has_lse));
    CHECK((info.has_column_sum && info.has_attn && info.has_value_norm && info.has_retention));
    CHECK((info.has_residual_norm && !info.has_image_score));
    const layer_slice s = file.read_layer(0, layer, 0, 7);
    CHECK(s.q == half_rows(0, 7, 30));
    CHECK(s.k == half_rows(0, 7, 15));
    CHECK(s.v == half_rows(0, 7, 6));
    CHECK(s.o == float_rows(0, 7, 12));
    CHECK(s.lse == float_rows(0, 7, 6));
    CHECK(s.value_norm == float_rows(0, 7, 6));
    CHECK(s.residual_norm == float_rows(0, 7, 1));
    CHECK(s.retention == want.retention());
    CHECK(file.column_sum(0, layer) == float_rows(0, 6, 4));
    CHECK(file.attention_positions(0, layer) == std::vector<std::int32_t>{4, 6});
    CHECK(file.attention_row(0, layer, 1) == want.attention);
  }
  CHECK(file.wo(2) == want.wo);
  CHECK(file.wo(0).empty());
  CHECK(file.tokens(0) == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6});
  CHECK(file.residual_final(0, 1, 3) == float_rows(1, 2, 11));
  CHECK(std::isinf(file.logits(0, 0, 1)[5]));
  CHECK(file.logits(0, 2, 4) == float_rows(2, 2, 17));
  CHECK(std::isinf(file.confidence(0)[1]));
}

TEST_CASE("slices, cursors and first_row name the rows they hold") {
  const temp_folder folder;
  const model_info m = small_model(2);
  sequence_plan p = small_plan(4, 7);
  p.first_row = 2;
  write_small(folder / "tail.h5", m, p);
  const reader file(folder / "tail.h5");
  CHECK(file.layer(0, 1).first_row == 2);
  layer_slice s = file.read_layer(0, 1, 1, 5);
  CHECK(s.row_begin == 2);
  CHECK(s.k == half_rows(1, 4, 15));
  CHECK(s.q == half_rows(2, 3, 30));
  CHECK(s.o == float_rows(2, 3, 12));
  CHECK(s.lse == float_rows(2, 3, 6));
  s = file.read_layer(0, 1, 0, 2);
  CHECK((s.q.empty() && s.o.empty() && s.lse.empty()));
  CHECK(s.row_begin == 2);
  layer_cursor cursor(file, 0, 3);
  std::vector<std::int64_t> begins;
  while (cursor.next(s)) begins.push_back(s.layer * 100 + s.begin);
  CHECK(begins == std::vector<std::int64_t>{0, 3, 6, 100, 103, 106});
  CHECK(error_of([&] { file.read_layer(0, 1, 5, 8); }).find("rows 5 to 8") != std::string::npos);
  CHECK(error_of([&] { file.read_layer(0, 9, 0, 1); }).find("layer 9") != std::string::npos);
  CHECK(error_of([&] { file.tokens(4); }).find("no sequence 4") != std::string::npos);
}

TEST_CASE("the fingerprint attribute is what the reader computes without it") {
  const temp_folder folder;
  write_small(folder / "a.h5", small_model(), small_plan(4, 40));
  const std::string stored = reader(folder / "a.h5").fingerprint(0);
  CHECK(stored.size() == 16);
  edit(folder / "a.h5",
       [](hid_t file) { H5Adelete_by_name(file, "/sequences/0", "fingerprint", H5P_DEFAULT); });
  CHECK(reader(folder / "a.h5").fingerprint(0) == stored);
  edit(folder / "a.h5", [](hid_t file) { poke<std::int32_t>(file, "/sequences/0/tokens", 3, 12); });
  CHECK(reader(folder / "a.h5").fingerprint(0) != stored);
}

TEST_CASE("a gap in what was put is refused at commit, and extents at every put") {
  const temp_folder folder;
  const std::string path = folder / "gap.h5";
  const model_info m = small_model();
  const sequence_plan p = small_plan();
  writer out(path, m, "test");
  check_message(error_of([&] { out.commit(1); }), path + ".part", {"no sequence has begun"});
  out.begin_sequence(p);
  put_steps(out, m, p, 0, 4);
  put_steps(out, m, p, 5, 7);
  check_message(error_of([&] { out.commit(5); }), path + ".part",
                {"rows written", "to commit 5 positions"});
  put_steps(out, m, p, 4, 5);
  out.commit(7);
  check_message(error_of([&] { out.put_k(0, 6, half_rows(0, 2, 15)); }), path + ".part",
                {"sequences/0/layers/0/k", "at row 6", "within 7 rows"});
  check_message(error_of([&] { out.put_k(0, 0, half_rows(0, 1, 14)); }), path + ".part",
                {"14 values", "whole rows of 15"});
  check_message(error_of([&] { out.put_k(7, 0, half_rows(0, 1, 15)); }), path + ".part",
                {"layers/7/k", "not planned"});
  check_message(error_of([&] { out.put_value_norm(0, 0, float_rows(0, 1, 6)); }), path + ".part",
                {"layers/0/value_norm", "not planned"});
  check_message(error_of([&] { out.put_tokens(0, std::vector<std::int32_t>{13}); }), path + ".part",
                {"token 13", "0 to 12"});
  check_message(error_of([&] { out.finish(); }), path + ".part", {"has not ended"});
  CHECK(std::filesystem::exists(path + ".part"));
  CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("an existing file stays until finish, and projected_bytes is close") {
  const temp_folder folder;
  const std::string path = folder / "old.h5";
  std::ofstream(path) << "old";
  model_info m = small_model(4);
  m.head_dim = m.value_dim = 64;
  const sequence_plan p = small_plan(200, 700);
  {
    writer out(path, m, "test");
    out.begin_sequence(p);
    put_steps(out, m, p, 0, 700);
    out.end_sequence();
    CHECK(std::filesystem::file_size(path) == 3);
    out.finish();
  }
  const auto size = static_cast<double>(reader(path).file_bytes());
  const auto projected = static_cast<double>(projected_bytes(m, p));
  CHECK(projected > 0.9 * size);
  CHECK(projected < 1.1 * size);
}

TEST_CASE("chunks lie along t and hold 64 KiB to 1 MiB") {
  const temp_folder folder;
  model_info m = small_model(1);
  m.head_dim = 64;
  write_small(folder / "a.h5", m, small_plan(4, 3000));
  edit(folder / "a.h5", [](hid_t file) {
    const hid_t data = H5Dopen2(file, "/sequences/0/layers/0/k", H5P_DEFAULT);
    const hid_t create = H5Dget_create_plist(data);
    hsize_t chunk[3] = {};
    REQUIRE(H5Pget_chunk(create, 3, chunk) == 3);
    CHECK(chunk[1] == 3);
    CHECK(chunk[2] == 64);
    CHECK(chunk[0] * 3 * 64 * 2 >= 64 << 10);
    CHECK(chunk[0] * 3 * 64 * 2 <= 1 << 20);
    CHECK(H5Pget_nfilters(create) == 0);
    std::uint16_t fill = 0;
    const hid_t type = H5Dget_type(data);
    REQUIRE(H5Pget_fill_value(create, type, &fill) >= 0);
    CHECK((fill & 0x7c00) == 0x7c00);
    CHECK((fill & 0x03ff) != 0);
    H5Tclose(type);
    H5Pclose(create);
    H5Dclose(data);
  });
}

TEST_CASE("a model that breaks the format is refused before a file is made") {
  const temp_folder folder;
  model_info m = small_model();
  m.n_q_heads = 7;
  check_message(error_of([&] { writer out(folder / "x.h5", m, "t"); }), folder / "x.h5.part",
                {"n_q_heads 7", "n_kv_heads 3"});
  CHECK_FALSE(std::filesystem::exists(folder / "x.h5.part"));
  check_message(error_of([&] { writer out(folder / "no/x.h5", small_model(), "t"); }),
                folder / "no/x.h5.part", {"No such file or directory"});
  writer first(folder / "x.h5", small_model(), "t");
  check_message(error_of([&] { writer second(folder / "x.h5", small_model(), "t"); }),
                folder / "x.h5.part", {"is writing this file"});
}

}  // namespace kvreplay::traces
