#include <fmt/format.h>

#include <fstream>
#include <sstream>

#include "replay/closed_loop_pass.hpp"
#include "replay/snapshot.hpp"
#include "reports/atomic_file.hpp"

namespace kvreplay::replay {
namespace {

constexpr const char* format_name = "kvreplay.snapshot/1";

}  // namespace

// What the bits of the rest depend on. The layout of plain structs is part of it: another build may
// have another.
std::string closed_loop_pass::snapshot_key() const {
  std::string key = fmt::format("{} {} {} {} {} {} {} {}", trace_.fingerprint(info_.id), info_.id,
                                model_.fingerprint(), info_.n_prompt, info_.n_tokens,
                                options_.kv_fp32, sizeof(step_measure), sizeof(logit_score));
  if (free()) key += fmt::format(" {}", free_run_note(options_.free));
  for (const auto& policy : policies_) key += fmt::format("\n{}", policy.resolved);
  return key;
}

template <class Visit>
void closed_loop_pass::for_each_state(std::int64_t& next, Visit&& visit) {
  visit(next);
  visit(progress_done_);
  visit(tokens_);
  for (auto& text : texts_) visit(text);
  visit(full_scores_);
  visit(recorded_kl_);
  full_.for_each_state(visit);
  for (auto& lane : lanes_) {
    if (lane != nullptr) lane->for_each_state(visit);
  }
}

void closed_loop_pass::save(std::int64_t next) {
  if (options_.snapshot.empty() || options_.kept || next >= info_.n_tokens) return;
  // The state of a rule that runs on the host is its own affair: such runs start again.
  for (const auto& lane : lanes_) {
    if (lane != nullptr && lane->state().rule(0) != nullptr) return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (std::chrono::duration<double>(now - saved_).count() < options_.snapshot_seconds) return;
  snapshot_writer out;
  out(std::string(format_name));
  out(snapshot_key());
  for_each_state(next, out);
  reports::write_atomic(options_.snapshot, out.bytes());
  saved_ = std::chrono::steady_clock::now();
}

// False where there is nothing to go on from. A lane that failed is part of the state.
bool closed_loop_pass::load(std::int64_t& next) {
  if (!options_.resume || options_.snapshot.empty() || options_.kept) return false;
  std::ifstream file(options_.snapshot, std::ios::binary);
  if (!file) return false;
  std::stringstream text;
  text << file.rdbuf();
  const std::string bytes = text.str();
  try {
    snapshot_reader in(bytes);
    std::string format, key;
    in(format);
    if (format != format_name) return false;
    in(key);
    if (key != snapshot_key()) return false;
    if (free()) texts_.resize(policies_.size());
    for_each_state(next, in);
    if (!in.at_end()) throw snapshot_error("a snapshot with more than it should hold");
  } catch (const snapshot_error& e) {
    throw traces::trace_error(
        fmt::format("{}: {}; delete it to start again", options_.snapshot, e.what()));
  }
  return true;
}

}  // namespace kvreplay::replay
