// Recordings that did not end: a killed writer, a full disk.
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "traces/check.hpp"
#include "traces/test_support.hpp"

namespace kvreplay::traces {

using namespace testing;

namespace {

constexpr std::int64_t prompt = 20, decode = 100;

// Runs `body` in a child process; its exit status, -1 where it did not exit by itself.
int in_child(const std::function<int()>& body, bool exit_handlers = false) {
  std::cout.flush();
  std::fflush(nullptr);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int result = body();
    if (exit_handlers) std::exit(result);
    ::_exit(result);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Feeds the prompt, then `steps` single steps with a commit every `every`, and dies without a word.
void killed_writer(const std::string& path, const sequence_plan& plan, std::int64_t steps,
                   std::int64_t every, int whole_sequences = 0) {
  const int status = in_child([&] {
    const model_info m = small_model();
    auto* out = new writer(path, m, "test");  // never destroyed
    for (int s = 0; s < whole_sequences; ++s) {
      out->begin_sequence(plan);
      put_steps(*out, m, plan, 0, plan.n_tokens);
      out->end_sequence();
    }
    out->begin_sequence(plan);
    put_steps(*out, m, plan, 0, plan.n_prompt);
    out->commit(plan.n_prompt);
    for (std::int64_t step = 1; step <= steps; ++step) {
      put_steps(*out, m, plan, plan.n_prompt + step - 1, plan.n_prompt + step);
      if (step % every == 0) out->commit(plan.n_prompt + step);
    }
    return 7;
  });
  REQUIRE(status == 7);
}

}  // namespace

TEST_CASE("a killed writer leaves whole steps to recover, and strict refuses them") {
  for (const auto& [every, kept] : {std::pair{10, 50}, std::pair{16, 48}}) {
    const temp_folder folder;
    const std::string path = folder / "killed.h5", part = path + ".part";
    sequence_plan plan = small_plan(prompt, prompt + decode);
    plan.spans = {{"early", {{1, 3}}}, {"late", {{60, 110}}}, {"never", {{100, 110}}}};
    killed_writer(path, plan, 57, every);
    CHECK_FALSE(std::filesystem::exists(path));
    check_message(open_error(part), part, {"complete is 0", "--recover"});
    const reader file(part, {.recover = true});
    CHECK_FALSE(file.complete());
    const sequence_info& s = file.sequence(0);
    CHECK(s.n_tokens == prompt + kept);
    CHECK(s.committed == prompt + kept);
    CHECK(s.n_decode() == kept);
    CHECK(s.logit_pos.front() == prompt - 1);
    CHECK(s.logit_pos.back() == prompt + kept - 1);
    CHECK(s.spans.at("early") == std::vector<std::pair<int, int>>{{1, 3}});
    CHECK(s.spans.at("late") ==
          std::vector<std::pair<int, int>>{{60, static_cast<int>(prompt) + kept}});
    CHECK(s.spans.at("never").empty());
    CHECK(static_cast<std::int64_t>(file.tokens(0).size()) == prompt + kept);
    CHECK(file.confidence(0).size() == s.logit_pos.size() * 4);
    const layer_slice slice = file.read_layer(0, 1, 0, s.n_tokens);
    CHECK(slice.k == half_rows(0, s.n_tokens, 15));
    CHECK(slice.lse == float_rows(0, s.n_tokens, 6));
    CHECK(error_of([&] { file.read_layer(0, 1, 0, s.n_tokens + 1); }) != "no error");
    CHECK(file.fingerprint(0).size() == 16);
  }
}

TEST_CASE("whole sequences before the killed one are recovered too") {
  const temp_folder folder;
  sequence_plan plan = small_plan(prompt, prompt + decode);
  plan.first_row = 10;
  killed_writer(folder / "two.h5", plan, 5, 5, 1);
  const reader file(folder / "two.h5.part", {.recover = true});
  REQUIRE(file.sequences().size() == 2);
  CHECK(file.sequence(0).n_tokens == prompt + decode);
  CHECK(file.sequence(1).n_tokens == prompt + 5);
  CHECK(file.read_layer(1, 0, 0, prompt + 5).q == half_rows(10, prompt - 5, 30));
}

TEST_CASE("a prompt that was not committed gives nothing to recover") {
  const temp_folder folder;
  const std::string path = folder / "short.h5";
  const model_info m = small_model();
  const sequence_plan plan = small_plan(prompt, prompt + decode);
  {
    writer out(path, m, "test");
    out.begin_sequence(plan);
    put_steps(out, m, plan, 0, 12);
    out.commit(12);
  }
  check_message(open_error(path + ".part", true), path + ".part",
                {"committed 12 of 20", "nothing to recover"});
  {
    writer out(path, m, "test");  // an old part is written over
    out.begin_sequence(plan);
    put_steps(out, m, plan, 0, plan.n_tokens);
    out.end_sequence();
    out.begin_sequence(plan);
  }
  CHECK(reader(path + ".part", {.recover = true}).sequences().size() == 1);
}

TEST_CASE("recorded probabilities are cut to the recovered positions") {
  const temp_folder folder;
  const std::string path = folder / "attn.h5";
  const model_info m = small_model(1);
  sequence_plan plan = small_plan(3, 6);
  plan.attn_pos = {3, 4, 5};
  {
    writer out(path, m, "test");
    out.begin_sequence(plan);
    put_steps(out, m, plan, 0, 5);
    for (int row = 0; row < 2; ++row) {
      std::vector<half_bits> p(6 * 6, 0);
      for (size_t h = 0; h < 6; ++h) p[h * 6 + static_cast<size_t>(row)] = 0x3c00;
      out.put_attention(0, row, p);
    }
    out.commit(5);
  }
  const reader file(path + ".part", {.recover = true});
  CHECK(file.attention_positions(0, 0) == std::vector<std::int32_t>{3, 4});
  const std::vector<half_bits> row = file.attention_row(0, 0, 1);
  REQUIRE(row.size() == 6 * 5);
  for (size_t h = 0; h < 6; ++h) CHECK(row[h * 5 + 1] == 0x3c00);
}

TEST_CASE("recover finds rows that `committed` promised and nobody wrote") {
  const temp_folder folder;
  const std::string path = folder / "lie.h5", part = path + ".part";
  const model_info m = small_model();
  const sequence_plan plan = small_plan(4, 7);
  {
    writer out(path, m, "test");
    out.begin_sequence(plan);
    put_steps(out, m, plan, 0, 5);
    out.commit(5);
  }
  edit(part, [](hid_t f) {
    set_attribute<std::uint64_t>(f, "/sequences/0", "committed", H5T_NATIVE_UINT64, 6);
  });
  check_message(error_of([&] { reader(part, {.recover = true}).read_layer(0, 0, 0, 6); }), part,
                {"layers/0/q", "step 5", "never written"});
  edit(part, [](hid_t f) { set_attribute<std::uint8_t>(f, "/", "complete", H5T_NATIVE_UINT8, 1); });
  check_message(open_error(part), part, {"committed is 6", "n_tokens=7"});
}

TEST_CASE("a full disk is reported with the file's name and leaves no finished file") {
  const temp_folder folder;
  // A small file system of its own where that is permitted, else a limit on the size of files.
  const bool mounted = ::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=2m") == 0;
  if (!mounted)
    MESSAGE("no tmpfs may be mounted here: a file size limit stands in for a full disk");
  const std::string path = folder / "full.h5";
  // HDF5 must not crash in the exit handlers after the failed write.
  const int status = in_child(
      [&] {
        std::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{2 << 20, 2 << 20};
        if (!mounted && ::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
        const std::string message = error_of([&] {
          model_info m = small_model();
          m.head_dim = 64;
          const sequence_plan plan = small_plan(4, 2000);
          writer out(path, m, "test");
          out.begin_sequence(plan);
          for (std::int64_t t = 0; t < 2000; t += 50) {
            put_steps(out, m, plan, t, t + 50);
            out.commit(t + 50);
          }
          out.end_sequence();
          out.finish();
        });
        const bool named = message.rfind(path + ".part", 0) == 0;
        const bool clear = message.find("disk full") != std::string::npos;
        return named && clear && message.find('\n') == std::string::npos ? 0 : 3;
      },
      true);
  CHECK(status == 0);
  CHECK_FALSE(std::filesystem::exists(path));
  const std::string strict = open_error(path + ".part");
  CHECK(strict.rfind(path + ".part", 0) == 0);
  if (mounted) {
    // What was committed before the disk filled up is still there.
    const reader file(path + ".part", {.recover = true});
    CHECK(file.sequence(0).n_tokens >= 50);
    CHECK(file.sequence(0).n_tokens < 2000);
    const std::int64_t n = file.sequence(0).n_tokens;
    CHECK(file.read_layer(0, 1, 0, n).k == half_rows(0, n, 3 * 64));
  }
  if (mounted) REQUIRE(::umount(folder.path().c_str()) == 0);
}

}  // namespace kvreplay::traces
