// The program as its user meets it: exit codes, one line per error, files that are whole or absent.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "replay/test_program.hpp"
#include "replay/test_support.hpp"
#include "reports/html.hpp"
#include "reports/json.hpp"
#include "traces/reader.hpp"
#include "traces/writer.hpp"

namespace kvreplay::replay {
namespace {

TEST_CASE("help, version and the catalogue") {
  temporary_folder folder;
  for (const std::string sub :
       {"", "record ", "synth ", "inspect ", "policies ", "replay ", "report "}) {
    const auto help = run(folder, sub + "--help");
    CHECK(help.code == 0);
    CHECK(help.out.find("--help") != std::string::npos);
    if (!sub.empty()) CHECK(help.out.find("Example:") != std::string::npos);
  }
  const auto version = run(folder, "--version");
  CHECK(version.code == 0);
  CHECK(version.out.find("HDF5") != std::string::npos);
  CHECK(run(folder, "policies").out.find("confkv") != std::string::npos);
  CHECK(run(folder, "policies confkv").out.find("tau") != std::string::npos);
}

TEST_CASE("usage errors are one line and exit code 2") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  std::vector<std::string> wrong{
      "",
      "replya",
      "replay " + t,
      "synth -o x.h5 --heads 5/2",
      "synth -o x.h5 --heads 5",
      "synth -o x.h5 --layers 0",
      "record --model x --tokens y -o z.h5",
      "record --model x --tokens y -o z.h5 --generate 4 --prompt-length 3",
      "record --model x --tokens y -o z.h5 --generate 4 --attention every=0",
      "report",
      "report r.json -o r.pdf",
      "policies confvk"};
  for (const char* rest : {"windw:budget=4",    "window:budgt=4",
                           "window:budget=-1",  "confkv:tau=-.5",
                           "window:budget=1e3", "window:budget=0.2",
                           "window:budget=",    "window:budget=18446744073709551616",
                           "window:budget=nan", "window:budget=4,budget=5",
                           "full -o x.xlsx",    "full --skip -1",
                           "full --skip 40",    "full --threads 0",
                           "full --device gpu", "full --mode closed",
                           "full --sequential", "full --kv-dtype fp32",
                           "full --resume",     "full --match-bytes 20%",
                           "full --unknown"}) {
    wrong.push_back(fmt::format("replay {} -p {}", t, rest));
  }
  for (const auto& arguments : wrong) {
    CAPTURE(arguments);
    const auto result = run(folder, arguments);
    CHECK(result.code == 2);
    CHECK(result.out.empty());
    CHECK_MESSAGE(one_line(result.err), result.err);
  }
  CHECK(run(folder, "replay " + t + " -p window:budgt=4").err.find("budget") != std::string::npos);
  const auto misspelt = run(folder, "replay " + t + " --polcy full");
  CHECK(misspelt.code == 2);
  CHECK_MESSAGE(one_line(misspelt.err), misspelt.err);
  CHECK(misspelt.err.find("did you mean '--policy'") != std::string::npos);
}

TEST_CASE("without a GPU: auto runs on the CPU, cuda is one line and exit code 1") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);  // hides what the machine may have
  const auto cuda = run(folder, "replay " + t + " -p full --device cuda -o " + (folder / "c.json"));
  const auto automatic = run(folder, "replay " + t + " -p full -o " + (folder / "a.json"));
  const auto version = run(folder, "--version");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  CHECK(cuda.code == 1);
  CHECK(cuda.out.empty());
  CHECK_MESSAGE(one_line(cuda.err), cuda.err);
  CHECK(cuda.err.find("--device cuda") != std::string::npos);
  for (const auto& file : std::filesystem::directory_iterator(folder / "")) {
    CHECK(file.path().filename().string().find("c.json") == std::string::npos);
  }
  CHECK(automatic.code == 0);
  CHECK(automatic.err.empty());
  CHECK(reports::read_json(slurp(folder / "a.json"), "a.json").tool.device == "cpu");
  CHECK(version.out.find("GPU      none (") != std::string::npos);
}

TEST_CASE("a file that is no trace costs one line and exit code 1") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto whole = slurp(t);
  std::ofstream(folder / "text.h5") << "not a trace at all\n";
  std::ofstream(folder / "empty.h5") << "";
  std::ofstream(folder / "cut.h5", std::ios::binary) << whole.substr(0, whole.size() / 2);
  for (const char* name : {"text.h5", "empty.h5", "cut.h5", "absent.h5", "."}) {
    for (const auto& arguments : {fmt::format("inspect {}", folder / name),
                                  fmt::format("replay {} -p full", folder / name)}) {
      CAPTURE(arguments);
      const auto result = run(folder, arguments);
      CHECK(result.code == 1);
      CHECK_MESSAGE(one_line(result.err), result.err);
      CHECK(result.err.find(name) != std::string::npos);
    }
  }
}

TEST_CASE("one bad trace among several is failed rows, the others go on") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  std::ofstream(folder / "bad.h5") << "no";
  const auto result = run(folder, "replay " + t + " " + (folder / "bad.h5") +
                                      " -p full -p h2o:budget=8 -o " + (folder / "r.json"));
  CHECK(result.code == 1);
  const auto report = reports::read_json(slurp(folder / "r.json"), "r.json");
  REQUIRE(report.runs.size() == 4);
  CHECK(report.runs[0].status == "ok");
  CHECK(report.runs[1].status == "ok");
  CHECK(report.runs[2].status == "failed");
  CHECK(report.runs[3].note.find("bad.h5") != std::string::npos);
}

TEST_CASE("results do not depend on threads, and repeat") {
  temporary_folder folder;
  const auto t =
      small_trace(folder, "--tokens 80 --prompt-length 40 --with wo,residual,sinks --window 0,20");
  const std::string command =
      "replay " + t +
      " -p full -p h2o:budget=8 -p confkv:high=8,low=16,recent=4+int8:window=6"
      " --match-bytes window:budget=12 -o ";
  std::vector<reports::report> reports;
  for (const char* threads : {"1", "2", "2"}) {
    const auto out = folder / fmt::format("r{}.json", reports.size());
    const auto result = run(folder, command + out + " --threads " + threads);
    REQUIRE_MESSAGE(result.code == 0, result.err);
    reports.push_back(reports::read_json(slurp(out), out));
  }
  CHECK(reports::differences(reports[0], reports[1]).empty());
  CHECK(reports::differences(reports[0], reports[2]).empty());
  CHECK(reports[0].runs[1].quality.residual_rel_l2.has_value());
}

TEST_CASE("the table says what open loop leaves out") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto result = run(folder, "replay " + t + " -p full -p window:budget=8");
  CHECK(result.code == 0);
  CHECK(result.out.find("open loop:") != std::string::npos);
  CHECK(result.out.find("window") != std::string::npos);
  CHECK(result.err.empty());
}

TEST_CASE("step, head and kept files have the documented headers and every row") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto result =
      run(folder, "replay " + t + " -p h2o:budget=8 --steps " + (folder / "s.csv") + " --heads " +
                      (folder / "h.csv") + " --kept " + (folder / "k.csv"));
  REQUIRE_MESSAGE(result.code == 0, result.err);
  const auto lines = [&](const std::string& name) {
    const auto text = slurp(folder / name);
    return std::count(text.begin(), text.end(), '\n');
  };
  CHECK(slurp(folder / "s.csv")
            .rfind("trace,policy,mode,sequence,step,bytes,entries,confidence,budget,"
                   "attention_recall,output_rel_l2\n",
                   0) == 0);
  CHECK(lines("s.csv") == 1 + 40);
  CHECK(lines("h.csv") == 1 + 2 * 3);
  CHECK(lines("k.csv") == 1 + 41 * 2 * 3);
  const auto kept = slurp(folder / "k.csv");
  const auto last = kept.rfind(',');
  CHECK(std::count(kept.begin() + static_cast<std::ptrdiff_t>(last), kept.end(), ' ') == 7);
}

TEST_CASE("what charts need stands in the results file, as in the detailed files") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto result = run(folder, "replay " + t +
                                      " -p full -p h2o:budget=8 -p confkv:tau=q0.5,high=8,low=16,"
                                      "recent=4 --skip 3 --steps " +
                                      (folder / "s.csv") + " --heads " + (folder / "h.csv") +
                                      " -o " + (folder / "r.json") + " -o " + (folder / "r.csv"));
  REQUIRE_MESSAGE(result.code == 0, result.err);
  const auto report = reports::read_json(slurp(folder / "r.json"), "r.json");
  std::istringstream steps(slurp(folder / "s.csv")), heads(slurp(folder / "h.csv"));
  std::string line;
  std::getline(steps, line);
  std::getline(heads, line);
  const auto field = [](const std::string& text, int which) {
    std::istringstream in(text);
    std::string out;
    // The policy is quoted where it holds commas: counted from the end.
    std::vector<std::string> fields;
    while (std::getline(in, out, ',')) fields.push_back(out);
    return fields[fields.size() - static_cast<size_t>(which)];
  };
  for (const auto& row : report.runs) {
    REQUIRE(row.details);
    const auto& bytes = row.details->series.at("bytes");
    CHECK(bytes.step.front() == 40);
    CHECK(bytes.step.back() == 79);
    for (int i = 0; i < 40; ++i) {
      std::getline(steps, line);
      const auto at = std::find(bytes.step.begin(), bytes.step.end(), std::stoll(field(line, 7)));
      if (at == bytes.step.end()) continue;  // on a straight line
      CHECK(bytes.value[static_cast<size_t>(at - bytes.step.begin())] ==
            doctest::Approx(std::stod(field(line, 6))));
    }
    const auto& map = row.details->heads.value();
    CHECK(map.layers == std::vector<int>{0, 1});
    CHECK(map.kv_heads == 3);
    for (size_t i = 0; i < 6; ++i) {
      std::getline(heads, line);
      CHECK(map.entries[i].value() == doctest::Approx(std::stod(field(line, 3))).epsilon(1e-4));
      CHECK(map.attention_recall[i].value() ==
            doctest::Approx(std::stod(field(line, 2))).epsilon(1e-4));
      CHECK(map.output_rel_l2[i].value() ==
            doctest::Approx(std::stod(field(line, 1))).epsilon(1e-4));
    }
    const auto& counts = row.details->confidence_histogram;
    CHECK(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == 37);
    CHECK(row.confidence.tau.has_value() == (row.name == "confkv"));
  }
  CHECK(report.runs[0].details->series.at("full_bytes").value ==
        report.runs[0].details->series.at("bytes").value);
  CHECK_FALSE(report.runs[0].details->series.contains("budget"));
  CHECK(report.runs[1].details->series.at("budget") == reports::point_series{{40, 79}, {8, 8}});
}

TEST_CASE("a page of several results files, or why there is none") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto r = folder / "r.json", page = folder / "r.html";
  const auto direct =
      run(folder, "replay " + t + " -p full -p h2o:budget=8 -o " + r + " -o " + page);
  if (!reports::page_unavailable().empty()) {
    CHECK(direct.code == 1);
    CHECK(direct.err.find("libjs-chart.js") != std::string::npos);
    return;
  }
  REQUIRE_MESSAGE(direct.code == 0, direct.err);
  CHECK(slurp(page).starts_with("<!DOCTYPE html>"));
  const auto times = folder / "t.json";
  REQUIRE(run(folder, "time " + t + " -p full --repeat 1 -o " + times).code == 0);
  const auto both = run(folder, "report " + r + " " + times + " -o " + page);
  REQUIRE_MESSAGE(both.code == 0, both.err);
  CHECK(both.out.find("3 rows") != std::string::npos);
  CHECK(slurp(page).find("\"count\":3") != std::string::npos);
  std::ofstream(folder / "bad.json") << "{\"schema\": \"kvreplay.results/1\", \"runs\": [{}]}";
  for (const char* name : {"bad.json", "absent.json", "."}) {
    const auto bad =
        run(folder, "report " + r + " " + (folder / name) + " -o " + (folder / "x.html"));
    CHECK(bad.code == 1);
    CHECK_MESSAGE(one_line(bad.err), bad.err);
    CHECK(bad.err.find(name) != std::string::npos);
    CHECK_FALSE(std::filesystem::exists(folder / "x.html"));
  }
}

TEST_CASE("an output that cannot be written is said before the run; an old file stays") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto nowhere = run(folder, "replay " + t + " -p full -o " + (folder / "no/such/r.json"));
  CHECK(nowhere.code == 1);
  CHECK(one_line(nowhere.err));
  std::ofstream(folder / "r.json") << "precious";
  const auto bad =
      run(folder, "replay " + (folder / "absent.h5") + " -p full -o " + (folder / "r.json"));
  CHECK(bad.code == 1);
  CHECK(slurp(folder / "r.json") == "precious");
}

TEST_CASE("a killed run's finished rows are kept by --resume") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto out = folder / "r.json";
  const std::string command = "replay " + t + " -p full -p h2o:budget=8 -p window:budget=8 -o ";
  REQUIRE(run(folder, command + out).code == 0);
  const auto whole = reports::read_json(slurp(out), out);
  // What a kill leaves: the journal with one finished row and half of another.
  std::ofstream(out + ".journal") << reports::to_json_line(whole.runs[0]) << "\n"
                                  << reports::to_json_line(whole.runs[1]).substr(0, 99);
  std::remove(out.c_str());
  REQUIRE(run(folder, command + out + " --resume").code == 0);
  CHECK(reports::differences(whole, reports::read_json(slurp(out), out)).empty());
  CHECK(slurp(out + ".journal").empty());
}

TEST_CASE("with a model the closed rows stand beside the open ones, and are resumed") {
  temporary_folder folder;
  const std::string model = std::string(KVREPLAY_SOURCE_DIR) + "/tracer/testdata/models/llama";
  std::ofstream(folder / "ids")
      << "3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4 6 2 6 4 3 3 8 3 2 7 9 5";
  REQUIRE(run(folder, "record --model " + model + " --tokens " + (folder / "ids") +
                          " --prompt-length 12 -o " + (folder / "t.h5"))
              .code == 0);
  const auto out = folder / "r.json";
  const std::string command = "replay " + (folder / "t.h5") + " --model " + model +
                              " -p full -p window:budget=6 -p h2o:budget=6 -o " + out;
  const auto made = run(folder, command);
  REQUIRE_MESSAGE(made.code == 0, made.err);
  CHECK(made.out.find("open loop: ") != std::string::npos);
  CHECK(made.out.find("closed loop: ") != std::string::npos);
  const auto whole = reports::read_json(slurp(out), out);
  REQUIRE(whole.runs.size() == 6);
  for (size_t i = 0; i < 6; ++i) {
    CHECK(whole.runs[i].mode == (i % 2 == 0 ? "open" : "closed"));
    CHECK(whole.runs[i].policy == whole.runs[i / 2 * 2].policy);
    CHECK(whole.runs[i].quality.logit_kl.has_value() == (i % 2 == 1));
  }
  CHECK(whole.runs[5].tokens.scored == 19);
  // What a kill leaves of it: an open row and its closed one.
  std::ofstream(out + ".journal") << reports::to_json_line(whole.runs[2]) << "\n"
                                  << reports::to_json_line(whole.runs[3]) << "\n";
  std::remove(out.c_str());
  REQUIRE(run(folder, command + " --resume --sequential").code == 0);
  auto resumed = reports::read_json(slurp(out), out);
  CHECK(reports::differences(whole, resumed).empty());
  const auto other =
      run(folder, "replay " + (folder / "t.h5") + " -p full --model " + model + "3_scaled");
  CHECK(other.code == 1);
  CHECK_MESSAGE(one_line(other.err), other.err);
}

TEST_CASE("matched policies meet the bytes of the target") {
  temporary_folder folder;
  const auto t = small_trace(folder, "--tokens 300 --prompt-length 150");
  const auto out = folder / "r.json";
  REQUIRE(run(folder, "replay " + t +
                          " -p full -p h2o:budget=20 -p streaming:budget=100 -p "
                          "window:budget=60+int8:window=16 --match-bytes window:budget=50 -o " +
                          out)
              .code == 0);
  const auto report = reports::read_json(slurp(out), out);
  const double target = 51.0 * 2 * 3 * 64;  // entries, layers, KV heads, bytes per entry
  CHECK_FALSE(report.runs[0].budget_factor.has_value());
  CHECK(report.runs[0].note.find("no budget") != std::string::npos);
  for (const size_t i : {1, 2}) {
    CHECK(*report.runs[i].memory.mean_bytes == target);
    CHECK(report.runs[i].policy.find("budget=50") != std::string::npos);
  }
  // INT8 comes in steps of one entry; within half a per cent or just below, and said.
  const double bytes = *report.runs[3].memory.mean_bytes;
  CHECK((std::abs(bytes / target - 1) <= 0.005 ||
         (bytes < target && report.runs[3].match_difference)));
}

TEST_CASE("traces in a read-only folder, and locked by someone else, are read") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const int file = open(t.c_str(), O_RDWR);
  REQUIRE(flock(file, LOCK_EX) == 0);
  CHECK(run(folder, "replay " + t + " -p full").code == 0);
  close(file);
}

TEST_CASE("names from files cannot break the table or the results") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto odd = folder / "a,\"b\" <script><b>ü\x1b[31m.h5";
  std::rename(t.c_str(), odd.c_str());
  const auto result = run(folder, "replay '" + odd + "' -p full -o '" + (folder / "r.json") +
                                      "' -o '" + (folder / "r.csv") + "'");
  REQUIRE_MESSAGE(result.code == 0, result.err);
  CHECK(result.out.find('\x1b') == std::string::npos);
  const auto json = slurp(folder / "r.json");
  CHECK(json.find("<script>") == std::string::npos);
  CHECK(reports::read_json(json, "r.json").runs[0].trace == odd);
  CHECK(nlohmann::json::parse(json)["runs"].size() == 1);
}

// What a crash leaves: NAME.part, committed up to position 50 of 80.
std::string unfinished_trace(const temporary_folder& folder) {
  const auto whole_path = small_trace(folder);
  const traces::reader whole(whole_path);
  traces::sequence_plan plan;
  plan.n_prompt = 40;
  plan.n_tokens = 80;
  plan.logit_pos = whole.sequence(0).logit_pos;
  plan.confidence = true;
  traces::writer out(folder / "cut.h5", whole.model(), "test");
  out.begin_sequence(plan);
  out.put_tokens(0, whole.tokens(0));
  out.put_confidence(0, whole.confidence(0));
  for (const int layer : whole.model().layers) {
    const auto slice = whole.read_layer(0, layer, 0, 50);
    out.put_q(layer, 0, slice.q);
    out.put_k(layer, 0, slice.k);
    out.put_v(layer, 0, slice.v);
    out.put_o(layer, 0, slice.o);
    out.put_lse(layer, 0, slice.lse);
  }
  out.commit(50);
  return folder / "cut.h5.part";
}

TEST_CASE("an unfinished recording: refused, or recovered and said") {
  temporary_folder folder;
  const auto part = unfinished_trace(folder);
  for (const std::string& command : {"inspect " + part, "replay " + part + " -p full"}) {
    const auto strict = run(folder, command);
    CHECK(strict.code == 1);
    CHECK(one_line(strict.err));
    CHECK(strict.err.find("--recover") != std::string::npos);
    const auto recovered = run(folder, command + " --recover");
    CHECK(recovered.code == 3);
    CHECK(one_line(recovered.err));
    CHECK(recovered.err.find("50 whole positions") != std::string::npos);
  }
  const auto checked = run(folder, "inspect " + part + " --recover --check --all");
  CHECK(checked.code == 3);
}

TEST_CASE("record, inspect, replay: a tiny checkpoint from end to end") {
  temporary_folder folder;
  const auto model = testdata("tracer", "models/llama");
  const std::string record = "record --model " + model + " --tokens " + model +
                             "/tokens.txt --prompt-length 20 -o " + (folder / "r.h5");
  const auto made = run(folder, record + " --with wo,value_norm,residual --logits full");
  REQUIRE_MESSAGE(made.code == 0, made.err);
  CHECK(made.err.find("will take") != std::string::npos);
  CHECK(run(folder, record + " --quiet").err.empty());
  REQUIRE(run(folder, record + " --with wo,residual").code == 0);
  CHECK(run(folder, "inspect " + (folder / "r.h5") + " --check --all").code == 0);
  const auto replayed = run(
      folder, "replay " + (folder / "r.h5") + " -p full -p h2o:budget=8 -o " + (folder / "r.json"));
  REQUIRE_MESSAGE(replayed.code == 0, replayed.err);
  const auto report = reports::read_json(slurp(folder / "r.json"), "r.json");
  CHECK(*report.runs[0].quality.attention_recall == doctest::Approx(1).epsilon(1e-5));
  CHECK(*report.runs[0].quality.output_rel_l2 < 1e-3);
  CHECK(*report.runs[0].quality.residual_rel_l2 < 1e-3);
  CHECK(*report.runs[1].quality.attention_recall < 1);
  for (const char* bad : {" --prompt-length 999", " --layers 7", " --attention every=x"}) {
    const auto refused = run(
        folder,
        "record --model " + model + " --tokens " + model + "/tokens.txt -o " + (folder / "x.h5") +
            (std::string(bad).find("--prompt") == std::string::npos ? " --prompt-length 20" : "") +
            bad);
    CHECK((refused.code == 1 || refused.code == 2));
    CHECK_FALSE(refused.err.empty());
    CHECK_FALSE(std::filesystem::exists(folder / "x.h5"));
  }
}

}  // namespace
}  // namespace kvreplay::replay
