#include "reports/atomic_file.hpp"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "reports/json.hpp"
#include "reports/test_support.hpp"

using namespace kvreplay::reports;
using testing::full_row;
using testing::scratch;
namespace fs = std::filesystem;

namespace {

void put(const std::string& path, std::string_view data) {
  std::ofstream(path, std::ios::binary) << data;
}

}  // namespace

TEST_CASE("a file is replaced whole and nothing is left beside it") {
  const scratch folder;
  const std::string file = folder / "r,\xC3\xA4 1.json";
  probe_writable(file);
  CHECK(folder.files() == 0);
  write_atomic(file, "one");
  CHECK(read_file(file) == "one");
  ::chmod(file.c_str(), 0640);
  probe_writable(file);
  CHECK(read_file(file) == "one");
  const std::string long_text(1 << 20, 'x');
  write_atomic(file, long_text);
  CHECK(read_file(file) == long_text);
  struct stat info = {};
  REQUIRE(::stat(file.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0640);
  CHECK(folder.files() == 1);
}

TEST_CASE("links are followed, devices written directly") {
  const scratch folder;
  write_atomic(folder / "real", "one");
  fs::create_symlink(folder / "real", folder / "link");
  write_atomic(folder / "link", "two");
  CHECK(fs::is_symlink(folder / "link"));
  CHECK(read_file(folder / "real") == "two");
  CHECK_NOTHROW(probe_writable("/dev/null"));
  CHECK_NOTHROW(write_atomic("/dev/null", "x"));
  CHECK(fs::is_character_file("/dev/null"));
}

TEST_CASE("what cannot be written says so and why, and the old file stays") {
  const scratch folder;
  const std::string nowhere = folder / "no/such/r.json";
  CHECK_THROWS_WITH_AS(probe_writable(nowhere), doctest::Contains("no/such/r.json"), report_error);
  CHECK_THROWS_AS(write_atomic(nowhere, "x"), report_error);
  fs::create_directory(folder / "dir");
  CHECK_THROWS_WITH_AS(probe_writable(folder / "dir"), doctest::Contains("irectory"), report_error);
  CHECK_THROWS_AS(write_atomic(folder / "dir", "x"), report_error);
  write_atomic(folder / "f", "old");
  CHECK_THROWS_AS(probe_writable(folder / "f/r.json"), report_error);
  CHECK_THROWS_WITH_AS(write_atomic("/dev/full", "x"), doctest::Contains("/dev/full"),
                       report_error);
  CHECK(read_file(folder / "f") == "old");
  CHECK_THROWS_AS((void)read_file(folder / "none"), report_error);
  CHECK_THROWS_AS((void)read_file(folder / "f", 2), report_error);
  CHECK(folder.files() == 2);
}

TEST_CASE("the journal gives back what was appended") {
  const scratch folder;
  const std::string target = folder / "r.json";
  CHECK(read_journal(target).empty());
  result nasty = full_row(2);
  nasty.note = "\xF0\x9F\x98\n\r</script>";
  {
    journal_writer journal(target, journal_writer::start::fresh);
    journal.append(full_row(1));
    CHECK(read_journal(target).size() == 1);  // before the writer ends
    journal.append(nasty);
  }
  CHECK(differences({{}, {full_row(1), nasty}}, {{}, read_journal(target)}).empty());
  {
    journal_writer journal(target, journal_writer::start::resume);
    journal.append(full_row(3));
    CHECK(read_journal(target).size() == 3);
    journal.remove();
  }
  CHECK(folder.files() == 0);
  {
    journal_writer journal(target, journal_writer::start::fresh);
    journal.append(full_row(1));
  }
  journal_writer(target, journal_writer::start::fresh).append(full_row(2));
  CHECK(differences({{}, {full_row(2)}}, {{}, read_journal(target)}).empty());
}

TEST_CASE("a last line cut anywhere is dropped, and the run goes on behind the one before") {
  const scratch folder;
  const std::string target = folder / "r.json", path = journal_path(target);
  const std::string first = to_json_line(full_row(1)) + "\n";
  const std::string last = to_json_line(full_row(2)) + "\n";
  for (std::size_t n = 0; n < last.size(); ++n) {
    put(path, first + last.substr(0, n));
    REQUIRE(read_journal(target).size() == 1);
    journal_writer(target, journal_writer::start::resume).append(full_row(3));
    const auto rows = read_journal(target);
    REQUIRE(rows.size() == 2);
    REQUIRE(differences({{}, {full_row(1), full_row(3)}}, {{}, rows}).empty());
  }
  put(path, first + last);
  CHECK(read_journal(target).size() == 2);
}

TEST_CASE("any other damage is named by line") {
  const scratch folder;
  const std::string target = folder / "r.json";
  const std::string line = to_json_line(full_row()) + "\n";
  for (const std::string& bad : {std::string("{}\n"), std::string("\n"), std::string("\x80\n")}) {
    put(journal_path(target), line + bad + line);
    CHECK_THROWS_WITH_AS((void)read_journal(target), doctest::Contains("r.json.journal:2"),
                         report_error);
  }
}
