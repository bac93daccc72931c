// How files are opened: read-only, without a lock, by many at once; golden traces of another tool.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <thread>

#include "traces/check.hpp"
#include "traces/test_support.hpp"

namespace kvreplay::traces {

using namespace testing;

TEST_CASE("golden traces of an independent writer pass every check") {
  for (const char* name : {"plain.h5", "grouped7.h5", "windowed.h5", "sinks.h5"}) {
    const reader file(test_data(name));
    CAPTURE(name);
    const check_report report = check(file, {.all = true});
    for (const check_finding& finding : report.findings) MESSAGE(finding.text);
    CHECK(report.ok());
    CHECK(report.rows_checked ==
          file.sequence(0).n_tokens * static_cast<std::int64_t>(file.model().layers.size()));
    CHECK(report.max_lse_error < 1e-5);
    CHECK(report.max_o_error < 1e-5);
    CHECK(report.nonfinite_values == 0);
    CHECK(file.producer() == "numpy reference");
  }
  const reader grouped(test_data("grouped7.h5"));
  CHECK(grouped.model().group() == 7);
  CHECK(grouped.model().value_dim == 6);
  CHECK(reader(test_data("windowed.h5")).model().window.size() == 4);
  CHECK(reader(test_data("sinks.h5")).model().sinks.size() == 12);
}

TEST_CASE("a read-only file in a read-only folder opens") {
  const temp_folder folder;
  const std::string path = folder / "a.h5";
  std::filesystem::copy_file(test_data("sinks.h5"), path);
  std::filesystem::permissions(path, std::filesystem::perms::owner_read);
  std::filesystem::permissions(
      folder.path(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const reader file(path);
  CHECK(file.read_layer(0, 1, 0, 64).k.size() == 64 * 3 * 16);
}

TEST_CASE("another process's exclusive lock does not matter") {
  const temp_folder folder;
  const std::string path = folder / "a.h5";
  std::filesystem::copy_file(test_data("sinks.h5"), path);
  int ready[2], done[2];
  REQUIRE(::pipe(ready) == 0);
  REQUIRE(::pipe(done) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int fd = ::open(path.c_str(), O_RDWR);
    char byte = ::flock(fd, LOCK_EX | LOCK_NB) == 0 ? 'y' : 'n';
    if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
    ::_exit(::read(done[0], &byte, 1) == 1 ? 0 : 1);
  }
  char byte = 0;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  REQUIRE(byte == 'y');
  CHECK(open_error(path) == "no error");
  REQUIRE(::write(done[1], "x", 1) == 1);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) ::close(fd);
}

TEST_CASE("a running recording can be read by another reader") {
  const temp_folder folder;
  const model_info m = small_model();
  const sequence_plan p = small_plan(4, 7);
  writer out(folder / "run.h5", m, "test");
  out.begin_sequence(p);
  put_steps(out, m, p, 0, 5);
  out.commit(5);
  CHECK(reader(folder / "run.h5.part", {.recover = true}).sequence(0).n_tokens == 5);
}

TEST_CASE("threads read one file, through one reader and through their own") {
  const reader shared(test_data("plain.h5"));
  const layer_slice want[] = {shared.read_layer(0, 0, 0, 192), shared.read_layer(0, 1, 0, 192),
                              shared.read_layer(0, 2, 0, 192), shared.read_layer(0, 3, 0, 192)};
  std::vector<int> wrong(8, 0);
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < wrong.size(); ++i) {
      threads.emplace_back([&, i] {
        const reader own(test_data("plain.h5"));
        const reader& file = i % 2 == 0 ? shared : own;
        for (int round = 0; round < 20; ++round) {
          const int layer = static_cast<int>(i + static_cast<size_t>(round)) % 4;
          const layer_slice s = file.read_layer(0, layer, 0, 192);
          if (s.k != want[layer].k || s.q != want[layer].q || s.o != want[layer].o) ++wrong[i];
        }
      });
    }
  }
  CHECK(wrong == std::vector<int>(8, 0));
}

TEST_CASE("compressed chunks read the same, with a cache that holds a row of them") {
  const temp_folder folder;
  const std::string path = folder / "gzip.h5";
  model_info m = small_model(1);
  m.n_kv_heads = 6;
  m.head_dim = 256;
  write_small(path, m, small_plan(4, 2000));
  const std::vector<half_bits> k = half_rows(0, 2000, 6 * 256);
  edit(path, [&](hid_t f) {
    const h5::handle type = h5::float16_type();
    // Chunks cross the heads: six of 1 MiB make a row.
    make_dataset(f, "/sequences/0/layers/0/k", {2000, 6, 256}, type.get(), k.data(), {2000, 1, 256},
                 1);
  });
  {
    const h5::session guard;
    const h5::handle file = h5::open_read_only(path);
    const h5::dataset data = h5::root(file.get(), path).open_dataset("sequences/0/layers/0/k");
    CHECK(data.cache_bytes() >= 6 * 2000 * 256 * 2);
    CHECK(data.cache_bytes() <= 8 * 2000 * 256 * 2);
  }
  const reader file(path);
  for (std::int64_t t = 0; t < 2000; t += 37) {
    const layer_slice s = file.read_layer(0, 0, t, t + 1);
    CHECK(std::equal(s.k.begin(), s.k.end(), k.begin() + t * 6 * 256));
  }
}

}  // namespace kvreplay::traces
