#include "replay/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace kvreplay::replay {
namespace {

std::string duration_text(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace

progress_bar::progress_bar(std::string label, std::string unit, bool quiet)
    : label_(std::move(label)), unit_(std::move(unit)), shown_(!quiet && isatty(STDERR_FILENO)) {}

progress_bar::~progress_bar() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

void progress_bar::update(std::int64_t done, std::int64_t total) {
  if (!shown_ || total <= 0) return;
  const auto now = clock::now();
  if (drawn_ && done < total && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  const double share = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  constexpr int width = 24;
  const auto full = static_cast<int>(share * width);
  std::string line = fmt::format("\r{} [{:#<{}}{:-<{}}] {:3.0f} %", label_, "", full, "",
                                 width - full, 100 * share);
  if (elapsed > 0.2 && done > 0) {
    line += fmt::format("  {:.4g} {}/s  {} left", static_cast<double>(done) / elapsed, unit_,
                        duration_text(elapsed * (1 - share) / std::max(share, 1e-9)));
  }
  std::fputs((line + "\033[K").c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace kvreplay::replay
