#include "tracer/record.hpp"

#include <doctest/doctest.h>
#include <hdf5.h>
#include <sys/wait.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/half.hpp"
#include "tracer/record_plan.hpp"
#include "tracer/sampling.hpp"
#include "tracer/test_support.hpp"
#include "traces/check.hpp"
#include "traces/reader.hpp"

namespace kvreplay::tracer {
namespace {

std::vector<std::int32_t> golden_tokens() {
  return read_token_file(model_directory("llama") + "/tokens.txt");
}

record_options base_options() {
  record_options out;
  out.tokens = golden_tokens();
  out.prompt_length = 20;
  return out;
}

void check_whole(const traces::reader& file) {
  traces::check_options all;
  all.all = true;
  const auto report = traces::check(file, all);
  for (const auto& finding : report.findings) MESSAGE(finding.text);
  CHECK(report.ok());
  CHECK(report.nonfinite_values == 0);
  CHECK(report.rows_checked > 0);
}

// Everything that a trace holds, for comparisons bit for bit.
struct trace_content {
  std::vector<std::int32_t> tokens;
  std::vector<float> confidence, logits, residual_final;
  std::vector<traces::layer_slice> layers;
  std::vector<std::vector<float>> column_sums;

  explicit trace_content(const traces::reader& file) {
    const auto& info = file.sequence(0);
    const auto rows = static_cast<std::int64_t>(info.logit_pos.size());
    tokens = file.tokens(0);
    confidence = file.confidence(0);
    if (info.has_logits) logits = file.logits(0, 0, rows);
    if (info.has_residual_final) residual_final = file.residual_final(0, 0, rows);
    for (const int layer : file.model().layers) {
      layers.push_back(file.read_layer(0, layer, 0, info.n_tokens));
      if (file.layer(0, layer).has_column_sum) column_sums.push_back(file.column_sum(0, layer));
    }
  }

  bool operator==(const trace_content& other) const {
    return tokens == other.tokens && confidence == other.confidence && logits == other.logits &&
           residual_final == other.residual_final && column_sums == other.column_sums &&
           std::equal(layers.begin(), layers.end(), other.layers.begin(), other.layers.end(),
                      [](const traces::layer_slice& a, const traces::layer_slice& b) {
                        return a.q == b.q && a.k == b.k && a.v == b.v && a.o == b.o &&
                               a.lse == b.lse && a.value_norm == b.value_norm &&
                               a.residual_norm == b.residual_norm;
                      });
  }
};

trace_content recorded(const model& m, const record_options& options) {
  const scratch_folder folder;
  record(m, folder.file("t.h5"), options, {});
  const traces::reader file(folder.file("t.h5"));
  check_whole(file);
  return trace_content(file);
}

// Largest |a - b| / (1 + |b|).
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double gap = std::abs(static_cast<double>(a[i]) - b[i]) / (1 + std::abs(b[i]));
    worst = std::max(worst, std::isnan(gap) ? INFINITY : gap);
  }
  return worst;
}

std::vector<float> widened(const std::vector<traces::half_bits>& raw) {
  std::vector<float> out;
  for (const auto bits : raw) out.push_back(kernels::half_to_float(bits));
  return out;
}

std::vector<float> expected_values(const std::string& model_name, const std::string& dataset) {
  const std::string path = model_directory(model_name) + "/expected.h5";
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  REQUIRE(file >= 0);
  const hid_t data = H5Dopen2(file, dataset.c_str(), H5P_DEFAULT);
  REQUIRE(data >= 0);
  const hid_t space = H5Dget_space(data);
  std::vector<float> out(static_cast<size_t>(H5Sget_simple_extent_npoints(space)));
  REQUIRE(H5Dread(data, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()) >= 0);
  H5Sclose(space);
  H5Dclose(data);
  H5Fclose(file);
  return out;
}

void compare_with_golden(const trace_content& trace, const std::string& name) {
  const std::vector<float> logits = expected_values(name, "logits");
  CHECK(distance(trace.logits, {logits.begin() + 19 * 61, logits.end()}) < 2e-4);
  for (size_t layer = 0; layer < trace.layers.size(); ++layer) {
    const std::string at = "layers/" + std::to_string(layer) + "/";
    const traces::layer_slice& slice = trace.layers[layer];
    CHECK(distance(slice.o, expected_values(name, at + "o")) < 2e-4);
    CHECK(distance(slice.lse, expected_values(name, at + "lse")) < 2e-4);
    CHECK(distance(widened(slice.q), expected_values(name, at + "q")) < 2e-3);
    CHECK(distance(widened(slice.k), expected_values(name, at + "k")) < 2e-3);
    CHECK(distance(widened(slice.v), expected_values(name, at + "v")) < 2e-3);
  }
}

TEST_CASE("golden models: block sizes and steps agree with float64 and with each other") {
  for (const std::string name :
       {"llama", "llama_bf16_sharded", "llama3_scaled", "qwen2", "qwen3", "gpt2"}) {
    CAPTURE(name);
    const model m = model::load(model_directory(name));
    record_options options = base_options();
    options.kv_fp32 = options.full_logits = true;
    const trace_content blocks = recorded(m, options);
    compare_with_golden(blocks, name);
    for (const int block : {1, 7}) {
      options.block = block;
      CHECK(recorded(m, options) == blocks);
    }
    options.stepwise = true;
    CHECK(recorded(m, options) == blocks);
  }
}

TEST_CASE("with 16-bit caches the trace is consistent with itself for any block size") {
  const model m = model::load(model_directory("llama3_scaled"));
  record_options options = base_options();
  options.full_logits = options.with_residual = options.with_value_norm = options.with_wo = true;
  options.attention_every = 1;
  const trace_content blocks = recorded(m, options);
  // Rounding moves the logits, but not far.
  const std::vector<float> logits = expected_values("llama3_scaled", "logits");
  const double moved = distance(blocks.logits, {logits.begin() + 19 * 61, logits.end()});
  CHECK(moved > 1e-5);
  CHECK(moved < 0.1);
  for (const int block : {1, 7, 20, 47}) {
    options.block = block;
    CHECK(recorded(m, options) == blocks);
  }
}

TEST_CASE("a generated run equals the teacher-forced run of its tokens bit for bit") {
  const model m = model::load(model_directory("qwen2"));
  for (const double temperature : {0.0, 0.8}) {
    const scratch_folder folder;
    record_options options = base_options();
    options.prompt_length.reset();
    options.generate = 30;
    options.temperature = temperature;
    options.seed = 5;
    options.full_logits = true;
    options.task = "free run";
    const auto summary = record(m, folder.file("g.h5"), options, {});
    CHECK(summary.positions == 78);
    REQUIRE(summary.generated.size() == 30);
    const traces::reader file(folder.file("g.h5"));
    check_whole(file);
    CHECK(summary.bytes == file.file_bytes());
    const auto& info = file.sequence(0);
    CHECK(info.n_prompt == 48);
    CHECK(info.logit_pos.front() == 47);
    CHECK(info.logit_pos.back() == 77);
    CHECK(info.temperature == temperature);
    CHECK(info.seed == 5);
    CHECK(info.task == "free run");
    CHECK(info.source == "real");
    record_options forced = base_options();
    forced.tokens = file.tokens(0);
    forced.prompt_length = 48;
    forced.full_logits = true;
    CHECK(recorded(m, forced) == trace_content(file));
    CHECK(record(m, folder.file("again.h5"), options, {}).generated == summary.generated);
    options.seed = 6;
    const bool same =
        record(m, folder.file("other.h5"), options, {}).generated == summary.generated;
    CHECK(same == (temperature == 0));
  }
}

TEST_CASE("rows of the decode alone: the same rows, and the prompt's column sums") {
  const model m = model::load(model_directory("llama"));
  record_options options = base_options();
  for (int i = 0; i < 3; ++i) {
    options.tokens.insert(options.tokens.end(), options.tokens.begin(),
                          options.tokens.begin() + 48);
  }
  options.prompt_length = 100;
  const trace_content all = recorded(m, options);
  options.rows_decode = true;
  const trace_content decode = recorded(m, options);
  options.block = 9;
  CHECK(recorded(m, options) == decode);
  const auto total = static_cast<std::int64_t>(options.tokens.size());
  for (size_t layer = 0; layer < all.layers.size(); ++layer) {
    const auto &a = all.layers[layer], &d = decode.layers[layer];
    CHECK(d.row_begin == 36);
    CHECK(d.k == a.k);
    CHECK(d.q == std::vector<traces::half_bits>(a.q.begin() + 36 * 48, a.q.end()));
    CHECK(d.o == std::vector<float>(a.o.begin() + 36 * 48, a.o.end()));
    CHECK(d.lse == std::vector<float>(a.lse.begin() + 36 * 6, a.lse.end()));
    REQUIRE(decode.column_sums[layer].size() == 600);
    for (size_t h = 0; h < 6; ++h) {
      double mass = 0;
      for (size_t i = 0; i < 100; ++i) mass += decode.column_sums[layer][h * 100 + i];
      CHECK(mass == doctest::Approx(100).epsilon(1e-5));  // each row gives one
    }
  }
  CHECK(decode.layers[0].end == total);
}

TEST_CASE("a subset of layers, attention rows of every k-th step, and provenance") {
  const scratch_folder folder;
  const model m = model::load(model_directory("llama3_scaled"));
  record_options options = base_options();
  options.layers = {2, 0};
  options.attention_every = 5;
  options.with_wo = true;
  options.producer = "test 1";
  record(m, folder.file("t.h5"), options, {});
  const traces::reader file(folder.file("t.h5"));
  check_whole(file);
  const traces::model_info& info = file.model();
  CHECK(info.layers == std::vector<int>{0, 2});
  CHECK(info.n_layers == 3);
  CHECK(info.wo_layers == std::vector<int>{0, 2});
  CHECK(info.architecture == "llama");
  CHECK(info.rope == "half");
  CHECK(info.rope_dim == 8);
  CHECK(info.rope_inv_freq == m.rope_inv_freq(0));
  CHECK(info.key_rotation == "rotated");
  CHECK(info.cache_dtype == "float16");
  CHECK(info.compute_dtype == "float32");
  CHECK(info.model_fingerprint == m.fingerprint());
  CHECK(info.softmax_scale == doctest::Approx(1 / std::sqrt(8.0)).epsilon(1e-15));
  CHECK(file.producer() == "test 1");
  CHECK(file.attention_positions(0, 2) == std::vector<std::int32_t>{20, 25, 30, 35, 40, 45});
  const auto row = widened(file.attention_row(0, 2, 1));
  REQUIRE(row.size() == 6 * 48);
  for (size_t h = 0; h < 6; ++h) {
    CHECK(std::accumulate(row.begin() + static_cast<std::ptrdiff_t>(h * 48),
                          row.begin() + static_cast<std::ptrdiff_t>(h * 48 + 26),
                          0.0) == doctest::Approx(1).epsilon(1e-3));
    CHECK(row[h * 48 + 26] == 0);
  }
  CHECK(distance(file.wo(2), m.wo(2)) < 1e-3);
}

TEST_CASE("windowed layers are recorded as such, for any block size and thread count") {
  const scratch_folder folder;
  nlohmann::json config = small_config();
  config["model_type"] = "qwen2";
  config["use_sliding_window"] = true;
  config["sliding_window"] = 9;
  config["max_window_layers"] = 1;
  write_model(folder.path(), config, small_weights(config, true));
  const model m = model::load(folder.path());
  record_options options;
  for (int i = 0; i < 60; ++i) options.tokens.push_back(i * 7 % 20);
  options.prompt_length = 30;
  options.rows_decode = true;
  const trace_content whole = recorded(m, options);  // checked, windows included
  for (const int block : {1, 8}) {
    options.block = block;
    CHECK(recorded(m, options) == whole);
  }
  {
    const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 1);
    CHECK(recorded(m, options) == whole);
  }
  record(m, folder.file("t.h5"), options, {});
  CHECK(traces::reader(folder.file("t.h5")).model().window == std::vector<int>{0, 9});
  config["use_sliding_window"] = false;
  write_model(folder.path(), config, small_weights(config, true));
  CHECK_FALSE(recorded(model::load(folder.path()), options) == whole);
}

TEST_CASE("a recorder that dies leaves whole positions up to its last flush") {
  const model m = model::load(model_directory("llama"));
  for (const int flush_every : {10, 16}) {
    const scratch_folder folder;
    record_options options = base_options();
    options.prompt_length.reset();
    options.generate = 100;
    options.flush_every = flush_every;
    const std::string path = folder.file("t.h5");
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      alarm(60);
      record(m, path, options, [](const record_progress& p) {
        if (p.done == 48 + 57) _exit(7);
      });
      _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 7);
    CHECK_FALSE(std::filesystem::exists(path));
    CHECK(message_of([&] { traces::reader strict(path + ".part"); }) != "");
    const traces::reader file(path + ".part", {true});
    CHECK(file.sequence(0).n_tokens == 48 + (flush_every == 10 ? 50 : 48));
    check_whole(file);
  }
}

TEST_CASE("the projected size is that of the file") {
  const scratch_folder folder;
  nlohmann::json config = small_config();
  config["head_dim"] = 64;
  config["num_hidden_layers"] = 3;
  write_model(folder.path(), config, small_weights(config));
  const model m = model::load(folder.path());
  record_options options;
  for (int i = 0; i < 1500; ++i) options.tokens.push_back(i * 7 % 20);
  options.prompt_length = 700;
  for (const bool everything : {false, true}) {
    options.rows_decode = !everything;
    options.full_logits = options.with_value_norm = options.with_residual = everything;
    options.with_wo = everything;
    options.attention_every = everything ? 50 : 0;
    const auto projected = static_cast<double>(projected_bytes(m.config(), options));
    const auto bytes = static_cast<double>(record(m, folder.file("t.h5"), options, {}).bytes);
    CAPTURE(projected);
    CAPTURE(bytes);
    CHECK(std::abs(projected - bytes) < 0.05 * bytes);
  }
}

TEST_CASE("options that do not fit the model or the disk are refused before anything is written") {
  const scratch_folder folder;
  const model m = model::load(model_directory("llama"));
  const auto error = [&](const std::function<void(record_options&)>& change) {
    record_options options = base_options();
    change(options);
    const std::string message = message_of([&] { record(m, folder.file("t.h5"), options, {}); });
    CHECK(std::filesystem::is_empty(folder.path()));
    return message;
  };
  CHECK(mentions(error([](auto& o) { o.prompt_length = 0; }),
                 "prompt length is 0, expected 1 .. 47"));
  CHECK(mentions(error([](auto& o) { o.prompt_length = 48; }), "expected 1 .. 47"));
  CHECK(mentions(error([](auto& o) { o.prompt_length.reset(); }), "required"));
  CHECK(mentions(error([](auto& o) { o.tokens.clear(); }), "no token ids"));
  CHECK(mentions(error([](auto& o) { o.tokens[3] = 61; }),
                 "token 3 of the input is 61, expected 0 .. 60"));
  CHECK(mentions(error([](auto& o) { o.tokens[3] = -1; }), "token 3 of the input is -1"));
  CHECK(mentions(error([](auto& o) { o.generate = 10; }), "all 48 tokens are the prompt"));
  CHECK(mentions(error([](auto& o) { o.temperature = 1; }), "temperature"));
  CHECK(mentions(error([](auto& o) { o.temperature = NAN; }), "temperature"));
  CHECK(mentions(error([](auto& o) { o.block = 0; }), "block is 0"));
  CHECK(mentions(error([](auto& o) { o.flush_every = 0; }), "flush_every"));
  CHECK(mentions(error([](auto& o) { o.layers = {3}; }), "layer 3, expected 0 .. 2"));
  CHECK(mentions(error([](auto& o) { o.layers = {1, 1}; }), "twice"));
  CHECK(mentions(error([](auto& o) { o.tokens.resize(4097); }),
                 "4097 positions, but llama knows 4096"));
  const auto generate = [](std::int64_t n) {
    return [n](record_options& o) {
      o.prompt_length.reset();
      o.generate = n;
    };
  };
  CHECK(mentions(error(generate(0)), "generate is 0"));
  CHECK(mentions(error(generate(4049)), "4097 positions"));
  CHECK(mentions(error(generate(INT64_MAX)), "knows 4096"));
  CHECK(mentions(message_of([] { require_space("t.h5", 1000000, 1049999); }),
                 "needs about 1050000 bytes and the disk has 1049999 left"));
  CHECK_NOTHROW(require_space("t.h5", 1000000, 1050000));
  CHECK(message_of([&] { record(m, folder.file("none/t.h5"), base_options(), {}); }) != "");
}

TEST_CASE("values that 16 bits cannot hold, and runs that leave the numbers, name layer and step") {
  const scratch_folder folder;
  const nlohmann::json config = small_config();
  record_options options;
  options.tokens = {1, 2, 3, 4};
  options.prompt_length = 2;
  const auto error = [&](const std::map<std::string, float>& factors) {
    float_tensors tensors = small_weights(config);
    for (const auto& [tensor, factor] : factors) {
      for (float& x : tensors.at(tensor).values) x *= factor;
    }
    write_model(folder.path(), config, tensors);
    const model m = model::load(folder.path());
    return message_of([&] { record(m, folder.file("t.h5"), options, {}); });
  };
  const std::string large = error({{"model.layers.1.self_attn.v_proj.weight", 1e6f}});
  CHECK(mentions(large, "t.h5: layer 1, step 0: v holds"));
  CHECK(mentions(large, "beyond float16's largest, 65504"));
  CHECK(mentions(error({{"model.layers.0.mlp.up_proj.weight", 1e10f},
                        {"model.layers.0.mlp.down_proj.weight", 1e30f}}),
                 "layer 1, step 0: q holds"));
  const std::string logits =
      error({{"model.norm.weight", 1e38f}, {"model.embed_tokens.weight", 1e3f}});
  CHECK(mentions(logits, "step 1: logits holds"));
  CHECK(mentions(logits, "expected finite values"));
}

TEST_CASE("sampling") {
  const std::vector<float> logits = {0, 2, 2, -1};
  CHECK(choose_token(logits, 0, 0.99) == 1);
  std::vector<double> share(4, 0.0);
  double sum = 0, squares = 0;
  const int draws = 20000;
  for (int i = 0; i < draws; ++i) {
    const double u = uniform_at(42, i);
    CHECK_MESSAGE((u >= 0 && u < 1), u);
    sum += u;
    squares += u * u;
    share[static_cast<size_t>(choose_token(logits, 0.5, u))] += 1.0 / draws;
  }
  CHECK(sum / draws == doctest::Approx(0.5).epsilon(0.02));
  CHECK(squares / draws == doctest::Approx(1 / 3.0).epsilon(0.03));
  const double total = 1 + 2 * std::exp(4.0) + std::exp(-2.0);
  CHECK(share[0] == doctest::Approx(1 / total).epsilon(0.2));
  CHECK(share[1] == doctest::Approx(std::exp(4.0) / total).epsilon(0.03));
  CHECK(share[2] == doctest::Approx(std::exp(4.0) / total).epsilon(0.03));
  CHECK(uniform_at(42, 7) != uniform_at(43, 7));
}

}  // namespace
}  // namespace kvreplay::tracer
