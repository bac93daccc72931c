// progress: a bar on stderr for people, nothing for pipes.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace kvreplay::replay {

// Silent unless stderr is a terminal and `quiet` is off. Redraws at most ten times a second. Calls
// from one thread at a time.
class progress_bar {
 public:
  // unit: what is counted, e.g. "tokens"; shown as a rate.
  progress_bar(std::string label, std::string unit, bool quiet);
  ~progress_bar();  // clears the line
  progress_bar(const progress_bar&) = delete;
  progress_bar& operator=(const progress_bar&) = delete;

  void update(std::int64_t done, std::int64_t total);

 private:
  using clock = std::chrono::steady_clock;
  std::string label_, unit_;
  bool shown_, drawn_ = false;
  clock::time_point start_ = clock::now(), last_{};
};

}  // namespace kvreplay::replay
