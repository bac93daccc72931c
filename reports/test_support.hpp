// Rows for the tests of this folder.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::reports::testing {

// Bytes that break careless writers: a cut emoji, a lone continuation byte, ESC, NUL, a script end
// tag, a replacement pattern, CSV's own characters, umlauts, what looks like our own escape.
inline std::vector<std::string> nasty_texts() {
  return {"\xF0\x9F\x98",
          "\x80",
          "\x1b[31mred",
          std::string("a\0b", 3),
          "</script><b>&amp;",
          "$'",
          "a,\"b\"\r\nc\nd",
          "\xC3\xA4\xC3\xB6\xC3\xBC \xE6\x97\xA5 \xF0\x9F\x98\x80",
          "\\x41 \\\\x \\",
          "\\\x80",
          "\xE2\x80\xA8\xE2\x80\xA9",
          "\xED\xA0\x80 \xC0\xAF \xF4\x90\x80\x80",
          "\xC2\x9b"
          "31m",
          " x "};
}

// Every number set, each to another value that is no short decimal.
inline result full_row(double base = 1) {
  result r;
  r.trace = "t.h5";
  r.trace_fingerprint = "0123abcd";
  r.sequence = 3;
  r.layers = "4/30";
  r.policy = "window:budget=64+int8";
  r.name = "window";
  r.params = {{"budget", "64"}, {"recent", "0.1"}};
  r.precision = "int8";
  r.mode = "closed";
  r.note = "a note";
  r.seed = -7;
  r.quality.more = {{"kept_share.answer", 0.0}, {"kept_share.needle", 0.0}};
  int i = 0;
  for_each_number(r, [&](std::string_view section, std::string_view, maybe& value) {
    ++i;
    value = section == "tokens" ? 10.0 * i : base * i / 7;
  });
  r.quality_ci["ppl"] = {1.0 / 3, 2.0 / 3};
  return r;
}

// A folder of its own, gone with the object.
class scratch {
 public:
  scratch() {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() /
            fmt::format("kvreplay_reports_{}_{}", ::getpid(), count++);
    std::filesystem::create_directories(path_);
  }
  ~scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  scratch(const scratch&) = delete;
  scratch& operator=(const scratch&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_),
                                                  std::filesystem::directory_iterator()));
  }

 private:
  std::filesystem::path path_;
};

}  // namespace kvreplay::reports::testing
