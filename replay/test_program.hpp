// The program under test as a user starts it: arguments in, exit code and texts out.
#pragma once

#include <doctest/doctest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "replay/test_support.hpp"

namespace kvreplay::replay {

struct run_result {
  int code = -1;
  std::string out, err;
};

inline std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Runs `kvreplay ARGUMENTS` through the shell; arguments are written as a user would.
inline run_result run(const temporary_folder& folder, const std::string& arguments) {
  const std::string command = std::string(KVREPLAY_PROGRAM) + " " + arguments + " >" +
                              (folder / "stdout") + " 2>" + (folder / "stderr") + " </dev/null";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, slurp(folder / "stdout"),
          slurp(folder / "stderr")};
}

inline bool one_line(const std::string& text) {
  return !text.empty() && text.back() == '\n' && std::count(text.begin(), text.end(), '\n') == 1;
}

inline std::string small_trace(const temporary_folder& folder,
                               const std::string& more = "--tokens 80 --prompt-length 40") {
  const auto path = folder / "t.h5";
  const auto made = run(folder, "synth -o " + path + " --layers 2 " + more);
  REQUIRE_MESSAGE(made.code == 0, made.err);
  return path;
}

}  // namespace kvreplay::replay
