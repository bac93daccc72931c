#include "replay/closed_lane.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "replay/selection.hpp"

namespace kvreplay::replay {
namespace {

constexpr std::int64_t most_passes = 4;  // beyond them a block is halved
constexpr std::int64_t calm_passes = 2;  // a block that settles in so many is calm ...
constexpr std::int64_t calm_run = 4;     // ... and so many of them in a row double it again

}  // namespace

closed_lane::closed_lane(lane state, std::vector<layer_inputs> inputs, const closed_gate& gate,
                         std::int64_t decode_steps, std::int64_t block, bool kept)
    : state_(std::move(state)),
      inputs_(std::move(inputs)),
      gate_(gate),
      gate_state_(state_.policy().budget.gate, gate.tau),
      measures_(state_.cache().shape().layers, decode_steps, state_.cache().shape().kv_heads, 0),
      scores_(static_cast<size_t>(decode_steps + 1)),
      kept_(kept ? kept_log(state_.cache().shape().layers, state_.cache().shape().kv_heads,
                            state_.n_prompt())
                 : kept_log()),
      next_(state_.n_prompt()),
      span_(state_.policy().needs.all_layers ? 1 : block),
      widest_(span_) {
  if (!state_.policy().needs.value_norm) return;
  const auto& shape = state_.cache().shape();
  const std::int64_t positions = state_.n_prompt() + decode_steps;
  value_norms_.assign(static_cast<size_t>(shape.layers),
                      std::vector<float>(static_cast<size_t>(positions * shape.q_heads)));
  for (size_t slot = 0; slot < inputs_.size(); ++slot)
    inputs_[slot].value_norm = value_norms_[slot];
}

void closed_lane::own_retention() {
  const std::int64_t positions = state_.n_prompt() + measures_.step_count;
  const auto values = static_cast<size_t>(positions * state_.cache().shape().kv_heads);
  retention_.assign(inputs_.size(), std::vector<float>(values));
  for (size_t slot = 0; slot < inputs_.size(); ++slot) inputs_[slot].retention = retention_[slot];
}

void closed_lane::set_retention(int slot, std::int64_t first, std::span<const float> rows) {
  std::copy(rows.begin(), rows.end(),
            retention_[static_cast<size_t>(slot)].begin() +
                static_cast<std::ptrdiff_t>(first * state_.cache().shape().kv_heads));
}

void closed_lane::set_value_norms(int slot, std::int64_t first, std::span<const float> norms) {
  if (value_norms_.empty()) return;
  std::copy(norms.begin(), norms.end(),
            value_norms_[static_cast<size_t>(slot)].begin() +
                static_cast<std::ptrdiff_t>(first * state_.cache().shape().q_heads));
}

logit_score* closed_lane::score(std::int64_t step) {
  return &scores_.at(static_cast<size_t>(step - (state_.n_prompt() - 1)));
}

std::int64_t closed_lane::block_steps(std::int64_t end) const {
  return std::min(span_, end - next_);
}

// Selection and ageing of one layer after a step, into the measures of that step.
void closed_lane::settle_step(int slot, std::int64_t step) {
  step_events events;
  settle(state_, slot, step, events, inputs(slot));
  const std::int64_t t = step - state_.n_prompt();
  if (t < 0) {
    measures_.prompt_evicted[static_cast<size_t>(slot)] = events.evicted;
    measures_.prompt_degenerate[static_cast<size_t>(slot)] = events.degenerate ? 1 : 0;
  } else {
    auto& at = measures_.at(slot, t);
    at.evicted = events.evicted;
    at.budget = events.budget;
    at.degenerate = events.degenerate;
  }
  kept_.note(state_.cache(), slot, step);
}

void closed_lane::settle_prompt(int slot) {
  if (!settles_late()) settle_step(slot, state_.n_prompt() - 1);
}

void closed_lane::end_prompt(const logit_score& score) {
  scores_.front() = score;
  if (settles_late()) settle_last(state_.n_prompt() - 1);
}

// The decision of a block's last step is taken from its own logits: nothing was assumed.
void closed_lane::settle_last(std::int64_t step) {
  if (gate_.waits) state_.decide(step, gate_state_.advance(step, score(step)->confidence));
  if (state_.policy().needs.all_layers) decide_all_layers(state_, step, inputs_);
  for (int slot = 0; slot < state_.cache().shape().layers; ++slot) settle_step(slot, step);
}

void closed_lane::begin_pass(std::int64_t steps) {
  ++passes_;
  ++block_passes_;
  if (start_) {
    state_ = *start_;
    kept_.rewind(state_.cache(), next_);
  } else if (gate_.waits && steps > 1) {  // a block of one assumes nothing and never iterates
    start_ = state_;
  }
}

void closed_lane::run_layer(int slot, const layer_block& block) {
  using clock = std::chrono::steady_clock;
  const auto begin = clock::now();
  events_.resize(static_cast<size_t>(block.steps));
  layer_block work = block;
  work.settle_last = !settles_late();
  work.inputs = &inputs(slot);
  kept_observer note;
  if (kept_.on()) note = [&](std::int64_t t) { kept_.note(state_.cache(), slot, t); };
  replay_layer(state_, slot, work, events_, {}, note);
  for (std::int64_t i = 0; i < block.steps; ++i) {
    take_events(events_[static_cast<size_t>(i)],
                measures_.at(slot, block.first + i - state_.n_prompt()));
  }
  seconds += std::chrono::duration<double>(clock::now() - begin).count();
}

void closed_lane::end_pass(std::int64_t steps) {
  const std::int64_t last = next_ + steps - 1;
  if (gate_.waits) {
    policies::gate_state gate = gate_state_;
    bool settled = true;
    std::vector<std::uint8_t> decisions;
    for (std::int64_t t = next_; t < last; ++t) {
      const bool tight = gate.advance(t, score(t)->confidence);
      settled = settled && tight == state_.tight(t);
      decisions.push_back(tight ? 1 : 0);
    }
    if (!settled) {
      // The first that differs is right, since all before it were; the others are the best guess.
      for (std::int64_t t = next_; t < last; ++t) {
        start_->decide(t, decisions[static_cast<size_t>(t - next_)] != 0);
      }
      return try_again(steps);
    }
    gate_state_ = gate;
    settle_last(last);
    // What follows is assumed to go on as it is, where no recording says otherwise.
    for (std::int64_t t = last + 1; !gate_.known && t < last + 1 + widest_; ++t) {
      if (t - state_.n_prompt() < measures_.step_count) state_.decide(t, state_.tight(last));
    }
  } else if (settles_late()) {
    settle_last(last);
  }
  start_.reset();
  next_ += steps;
  ++blocks_;
  calm_blocks_ = block_passes_ <= calm_passes ? calm_blocks_ + 1 : 0;
  if (calm_blocks_ >= calm_run) {
    span_ = std::min(widest_, span_ * 2);
    calm_blocks_ = 0;
  }
  block_passes_ = 0;
}

void closed_lane::try_again(std::int64_t steps) {
  if (block_passes_ < most_passes || steps == 1) return;
  span_ = (steps + 1) / 2;
  calm_blocks_ = 0;
  block_passes_ = 0;
}

double closed_lane::passes_per_block() const {
  return blocks_ == 0 ? 0 : static_cast<double>(passes_) / static_cast<double>(blocks_);
}

void closed_lane::fail(std::string why) {
  if (failed_.empty()) failed_ = std::move(why);
}

}  // namespace kvreplay::replay
