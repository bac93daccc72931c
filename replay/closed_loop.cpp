#include "replay/closed_loop.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "replay/closed_loop_pass.hpp"
#include "replay/model_match.hpp"
#include "replay/policy_files.hpp"
#include "replay/projection.hpp"
#include "replay/rounding.hpp"
#include "tracer/sampling.hpp"

namespace kvreplay::replay {
namespace {

constexpr std::int64_t most_rows = 4096;  // of one forward pass: bounds its memory, not its results

void fail(lane_output& out, std::string why) {
  out.row.status = "failed";
  out.row.note = std::move(why);
}

// `full` in 16 bits is the reference itself.
bool is_full(const policies::policy& policy) {
  return policy.name == "full" && policy.precision.body == policies::body_kind::none;
}

// A free run has a length of its own, and of the recording the prompt alone.
traces::sequence_info length_of(traces::sequence_info info, const free_run& run) {
  if (run.tokens > 0) info.n_tokens = info.n_prompt + run.tokens;
  return info;
}

bool reads_confidence(const policies::gate_rule& gate) {
  return gate.gate != policies::gate_signal::random && gate.gate != policies::gate_signal::constant;
}

std::vector<std::int64_t> positions_from(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

}  // namespace

closed_loop_pass::closed_loop_pass(const traces::reader& trace, int sequence,
                                   const tracer::model& model,
                                   std::span<const policies::policy> policies,
                                   const closed_loop_options& options)
    : trace_(trace),
      info_(length_of(trace.sequence(sequence), options.free)),
      trace_model_(trace.model()),
      model_(model),
      policies_(policies),
      options_(options),
      tokens_(trace.tokens(sequence)),
      layers_(static_cast<size_t>(model.config().n_layers)),
      shape_(
          (std::iota(layers_.begin(), layers_.end(), 0), cache_shape_for(trace_model_, layers_))),
      full_(shape_, info_.n_tokens),
      full_scores_(static_cast<size_t>(info_.n_decode() + 1)) {
  require_same_model(trace, sequence, model);
  if (info_.n_tokens > model.config().max_position_embeddings) {
    throw traces::trace_error(fmt::format("{}: {} positions of a free run, but {} knows {}",
                                          trace.path(), info_.n_tokens, model.config().name,
                                          model.config().max_position_embeddings));
  }
  if (free()) tokens_.resize(static_cast<size_t>(info_.n_prompt));
  if (!free() && info_.has_logits &&
      find_run(info_.logit_pos, info_.n_prompt, info_.n_decode()) >= 0) {
    recorded_kl_.resize(static_cast<size_t>(info_.n_decode()));
  }
}

std::vector<lane_output> closed_loop_pass::run() {
  std::vector<lane_output> out(policies_.size());
  start_lanes(out);
  const auto running = static_cast<std::int64_t>(std::count_if(
      lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane != nullptr; }));
  progress_total_ = (running + 1) * info_.n_tokens * shape_.layers;
  const std::int64_t block = free() ? 1 : options_.block;
  std::int64_t next = info_.n_prompt;
  if (!load(next)) {
    run_prompt();
    if (free()) start_texts();
  }
  while (next < info_.n_tokens) {
    const std::int64_t steps = std::min(block, info_.n_tokens - next);
    run_block(next, steps);
    next += steps;
    save(next);
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (lanes_[i] != nullptr && !lanes_[i]->failed().empty()) fail(out[i], lanes_[i]->failed());
    if (out[i].row.status == "ok") finish(i, out[i]);
  }
  return out;
}

void closed_loop_pass::start_lanes(std::vector<lane_output>& out) {
  for (size_t i = 0; i < policies_.size(); ++i) {
    const auto& policy = policies_[i];
    describe_row(trace_, info_.id, policy, shape_.layers, options_.skip, "closed", out[i].row);
    out[i].row.tokens.decoded = info_.n_decode();
    out[i].row.tokens.scored = info_.n_decode() - options_.skip;
    lanes_.emplace_back();
    if (is_full(policy)) continue;
    try {
      lanes_.back() = start_lane(policy);
      if (gated_retention(*lanes_.back())) lanes_.back()->own_retention();
      if (policy.needs.retention) {
        add_note(out[i].row,
                 retention_gate_
                     ? "retention by the trace's gate on the cache's own keys and values"
                     : "retention as recorded in the trace");
      }
    } catch (const std::exception& e) {
      fail(out[i], e.what());
    }
  }
}

std::unique_ptr<closed_lane> closed_loop_pass::start_lane(const policies::policy& policy) {
  if (policy.needs.image_span) {
    throw std::invalid_argument(
        fmt::format("{} does not run in the closed loop: images are dropped inside the prompt pass",
                    policy.name));
  }
  if (free() && (policy.needs.retention || policy.score.kind == policies::score_kind::future)) {
    throw std::invalid_argument(fmt::format(
        "{} does not run free: it reads what was recorded of another text", policy.name));
  }
  auto dims = dims_for(trace_model_);
  dims.recorded_layers = layers_;
  const auto gate = gate_for(policy);
  const auto tail = options_.kv_fp32 ? kernels::tail_format::fp32 : kernels::tail_format::fp16;
  return std::make_unique<closed_lane>(
      lane(with_files(policy, shape_.layers, shape_.q_heads, shape_.kv_heads, info_.id), dims,
           shape_, layers_, info_.n_prompt, gate.assumed, tail),
      inputs_for(policy), gate, info_.n_decode(), options_.block, options_.kept);
}

// Retention: the gate of the trace, evaluated on the lane's own keys and values, or as recorded.
// The rotary frequencies of the model; value norms from its output projections.
std::vector<layer_inputs> closed_loop_pass::inputs_for(const policies::policy& policy) {
  for (int l = static_cast<int>(output_weights_.size());
       policy.needs.value_norm && l < shape_.layers; ++l) {
    output_weights_.push_back(output_weights(projection(), model_.wo(l)));
  }
  if (policy.needs.retention && !retention_gate_) {
    retention_gate_ = traces::read_retention_gate(trace_.path(), trace_model_);
  }
  std::vector<layer_inputs> out(layers_.size());
  const bool ahead = policy.score.kind == policies::score_kind::future;
  if (!policy.needs.retention && !policy.needs.rope && !ahead) return out;
  const std::string missing = missing_for(policy, trace_, info_.id);
  if (!missing.empty()) throw traces::trace_error(missing);
  if (!trace_model_.records_all_layers()) {
    throw traces::trace_error(
        fmt::format("{}: {} needs every layer of the recording", trace_.path(), policy.name));
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto& known = recorded(layers_[i]);
    out[i] = inputs_of(known.data);
    out[i].future = known.future.get();
  }
  return out;
}

const closed_loop_pass::recorded_layer& closed_loop_pass::recorded(int layer) {
  auto [at, fresh] = recorded_.try_emplace(layer);
  auto& known = at->second;
  if (!fresh) return known;
  std::vector<kernels::mass_layout> layouts;
  for (const auto& policy : policies_) {
    if (policy.score.kind == policies::score_kind::future) {
      layouts.push_back(layout_of(policy.score));
    }
  }
  known.shape = cache_shape_for(trace_model_, {&layer, 1});
  known.data = load_layer(trace_, info_.id, layer);
  known.data.v = known.data.o = {};
  if (layouts.empty()) {
    known.data.q = known.data.k = known.data.lse = {};
  } else {
    known.future = std::make_unique<future_mass>(known.shape, known.data, layouts);
  }
  return known;
}

std::vector<float> closed_loop_pass::norms_of(int layer, std::span<const float> v,
                                              std::int64_t rows) const {
  if (output_weights_.empty()) return {};
  return value_norms(projection(), output_weights_[static_cast<size_t>(layer)], shape_.kv_heads, v,
                     rows);
}

std::vector<float> closed_loop_pass::retention_of(int layer, const float* k, const float* v,
                                                  std::int64_t rows) const {
  std::vector<float> out;
  for (std::int64_t r = 0; r < rows * shape_.kv_heads; ++r) {
    out.push_back(traces::log_retention(*retention_gate_, layer,
                                        static_cast<int>(r % shape_.kv_heads),
                                        k + r * shape_.head_dim, v + r * shape_.value_dim));
  }
  return out;
}

closed_gate closed_loop_pass::gate_for(const policies::policy& policy) const {
  closed_gate out;
  if (!policy.budget.gated) return out;
  const auto& rule = policy.budget.gate;
  std::vector<double> c;
  if (free() && policy.needs.future) {
    throw traces::trace_error(fmt::format(
        "{}: it reads the recorded run, which a free run does not follow", policy.name));
  }
  if (reads_confidence(rule) && !free()) c = recorded_confidence(trace_, info_.id, rule);
  if (policy.needs.future && c.empty())
    throw traces::trace_error(missing_for(policy, trace_, info_.id));
  // Equal budgets leave nothing to decide.
  out.waits = reads_confidence(rule) && rule.gate != policies::gate_signal::shuffled &&
              !(rule.high == rule.low);
  out.known = !c.empty();
  out.tau = policies::resolve_tau(rule, c);
  // Without a recording: on the loose side, as before the first step. random and constant look at
  // the number of values alone.
  if (c.empty()) c.assign(static_cast<size_t>(info_.n_decode() + 1), 0.0);
  out.assumed = policies::gate_decisions(rule, info_.n_prompt, c);
  return out;
}

std::int32_t closed_loop_pass::token_after(std::int64_t position) const {
  return !free() && position + 1 < info_.n_tokens ? tokens_[static_cast<size_t>(position + 1)] : -1;
}

void closed_loop_pass::run_prompt() {
  const auto n = static_cast<size_t>(info_.n_prompt);
  const auto residual =
      model_.forward(std::span(tokens_).first(n), positions_from(0, info_.n_prompt),
                     [&](tracer::attention_block& b) { prompt_layer(b); });
  score_prompt(std::span(residual).last(static_cast<size_t>(model_.config().hidden_size)));
}

// One layer of the prompt: its keys, values and observations go to every lane.
void closed_loop_pass::prompt_layer(tracer::attention_block& block) {
  if (!options_.kv_fp32) round_to_half(block);
  layer_data data;
  data.layer = block.layer;
  data.n_prompt = data.n_tokens = block.rows;
  data.q_width = std::int64_t{shape_.q_heads} * shape_.head_dim;
  data.k_width = std::int64_t{shape_.kv_heads} * shape_.head_dim;
  data.v_width = std::int64_t{shape_.kv_heads} * shape_.value_dim;
  data.o_width = std::int64_t{shape_.q_heads} * shape_.value_dim;
  full_.attend(block.layer, 0, block.rows, block.q.data(), block.k.data(), block.v.data(),
               block.o.data(), data.lse);
  data.q.assign(block.q.begin(), block.q.end());
  data.k.assign(block.k.begin(), block.k.end());
  data.v.assign(block.v.begin(), block.v.end());
  const kernels::cache_shape own = cache_shape_for(trace_model_, {&block.layer, 1});
  prompt_observations prompt(own, data);
  const auto norms = norms_of(block.layer, data.v, block.rows);
  std::vector<float> retention;
  if (retention_gate_) {
    retention = retention_of(block.layer, data.k.data(), data.v.data(), block.rows);
  }
  tbb::parallel_for(size_t{0}, lanes_.size(), [&](size_t i) {
    if (lanes_[i] == nullptr || !lanes_[i]->failed().empty()) return;
    try {
      lanes_[i]->set_value_norms(block.layer, 0, norms);
      if (gated_retention(*lanes_[i])) lanes_[i]->set_retention(block.layer, 0, retention);
      fill_prompt(lanes_[i]->state(), block.layer, data, prompt, lanes_[i]->inputs(block.layer));
      lanes_[i]->settle_prompt(block.layer);
    } catch (const std::exception& e) {
      lanes_[i]->fail(fmt::format("{}: sequence {}, prompt, layer {}: {}", trace_.path(), info_.id,
                                  block.layer, e.what()));
    }
  });
  report_progress(block.rows *
                  (1 + std::ssize(lanes_) - std::count(lanes_.begin(), lanes_.end(), nullptr)));
}

// c(P-1) is the same row for all, under each gate's own weights.
void closed_loop_pass::score_prompt(std::span<const float> residual) {
  scored_position at;
  at.position = info_.n_prompt - 1;
  at.next = token_after(at.position);
  const token_choice choice{options_.free.temperature,
                            tracer::uniform_at(options_.free.seed, at.position + 1)};
  if (free()) at.choice = &choice;
  at.reference = residual.data();
  at.reference_out = &full_scores_.front();
  std::vector<logit_score> scores(lanes_.size());
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i] == nullptr) continue;
    at.rows.push_back({residual.data(), &lanes_[i]->state().policy().budget.gate, &scores[i]});
  }
  score_logits(model_, {&at, 1});
  tbb::parallel_for(size_t{0}, lanes_.size(), [&](size_t i) {
    if (lanes_[i] == nullptr || !lanes_[i]->failed().empty()) return;
    try {
      lanes_[i]->end_prompt(scores[i]);
    } catch (const std::exception& e) {
      lanes_[i]->fail(
          fmt::format("{}: sequence {}, prompt: {}", trace_.path(), info_.id, e.what()));
    }
  });
}

// A cross-check of the model against the recording, where whole rows were recorded.
void closed_loop_pass::load_recorded_logits(std::int64_t first, std::int64_t steps) {
  recorded_logits_.clear();
  if (recorded_kl_.empty()) return;
  const std::int64_t row = find_run(info_.logit_pos, first, steps);
  recorded_logits_ = trace_.logits(info_.id, row, row + steps);
}

// The reference goes through once; lanes repeat what has not settled, and may take the block in
// smaller pieces.
void closed_loop_pass::run_block(std::int64_t first, std::int64_t steps) {
  const std::int64_t end = first + steps;
  block_first_ = first;
  for (auto& [layer, known] : recorded_) {
    if (known.future != nullptr) known.future->load(first, steps);
  }
  std::vector<float> reference;  // [steps, hidden_size]
  bool reference_done = false;
  for (;;) {
    std::vector<lane_rows> batch;
    std::int64_t rows = 0;
    const auto add = [&](closed_lane* lane, size_t index, std::int64_t at, std::int64_t count) {
      if (rows > 0 && rows + count > most_rows) {
        run_rows(batch, reference);
        batch.clear();
        rows = 0;
      }
      batch.push_back({lane, index, at, count, rows});
      rows += count;
    };
    if (!reference_done) {
      load_recorded_logits(first, steps);
      add(nullptr, 0, first, steps);
    }
    reference_done = true;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      closed_lane* lane = lanes_[i].get();
      if (lane == nullptr || !lane->failed().empty() || lane->next() >= end) continue;
      add(lane, i, lane->next(), lane->block_steps(end));
    }
    if (batch.empty()) return;
    run_rows(batch, reference);
  }
}

// One forward pass; the reference's rows, which come first where there are any, stay in
// `reference`.
void closed_loop_pass::run_rows(std::vector<lane_rows>& rows, std::vector<float>& reference) {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> positions;
  for (const auto& part : rows) {
    if (part.lane != nullptr) part.lane->begin_pass(part.steps);
    const auto& text = free() && part.lane != nullptr ? texts_[part.index] : tokens_;
    for (std::int64_t t = part.first; t < part.first + part.steps; ++t) {
      tokens.push_back(text[static_cast<size_t>(t)]);
      positions.push_back(t);
    }
  }
  const auto residual = model_.forward(
      tokens, positions, [&](tracer::attention_block& block) { attend(block, rows); });
  const bool with_reference = rows.front().lane == nullptr;
  if (with_reference) {
    const auto count = static_cast<size_t>(rows.front().steps * model_.config().hidden_size);
    reference.assign(residual.begin(), residual.begin() + static_cast<std::ptrdiff_t>(count));
  }
  score_rows(rows, residual, reference, with_reference);
  if (free() && with_reference) {
    tokens_.push_back(
        full_scores_[static_cast<size_t>(rows.front().first - info_.n_prompt + 1)].chosen);
  }
  tbb::parallel_for(size_t{0}, rows.size(), [&](size_t i) {
    closed_lane* lane = rows[i].lane;
    if (lane == nullptr || !lane->failed().empty()) return;
    try {
      for (std::int64_t t = rows[i].first; t < rows[i].first + rows[i].steps; ++t) {
        if (!lane->score(t)->finite) {
          throw std::domain_error(fmt::format("step {}: the logits are not finite", t));
        }
      }
      if (free()) go_on(rows[i]);
      lane->end_pass(rows[i].steps);
    } catch (const std::exception& e) {
      lane->fail(fmt::format("{}: sequence {}: {}", trace_.path(), info_.id, e.what()));
    }
  });
}

// All texts begin with the token that the prompt's last row gave: the same row for all.
void closed_loop_pass::start_texts() {
  tokens_.push_back(full_scores_.front().chosen);
  texts_.assign(policies_.size(), tokens_);
}

void closed_loop_pass::go_on(const lane_rows& rows) {
  texts_[rows.index].push_back(rows.lane->score(rows.first)->chosen);
}

void closed_loop_pass::attend(tracer::attention_block& block, std::span<const lane_rows> rows) {
  if (!options_.kv_fp32) round_to_half(block);
  tbb::parallel_for(size_t{0}, rows.size(), [&](size_t i) {
    // Without isolation a thread that waits inside the reference's products could start a lane
    // there: nothing wrong, but its time would count twice.
    tbb::this_task_arena::isolate([&] { attend_lane(block, rows[i]); });
  });
  std::int64_t fresh = 0;
  for (const auto& part : rows) fresh += part.steps;
  report_progress(fresh);
}

void closed_loop_pass::attend_lane(tracer::attention_block& block, const lane_rows& rows) {
  const std::int64_t q_width = std::int64_t{shape_.q_heads} * shape_.head_dim;
  const std::int64_t k_width = std::int64_t{shape_.kv_heads} * shape_.head_dim;
  const std::int64_t v_width = std::int64_t{shape_.kv_heads} * shape_.value_dim;
  const std::int64_t o_width = std::int64_t{shape_.q_heads} * shape_.value_dim;
  const float* q = block.q.data() + rows.row * q_width;
  const float* k = block.k.data() + rows.row * k_width;
  const float* v = block.v.data() + rows.row * v_width;
  float* o = block.o.data() + rows.row * o_width;
  if (rows.lane == nullptr) {
    std::vector<float> lse;
    full_.attend(block.layer, rows.first, rows.steps, q, k, v, o, lse);
    return;
  }
  if (!rows.lane->failed().empty()) return;
  try {
    if (rows.lane->state().policy().needs.value_norm) {
      const auto n = static_cast<size_t>(rows.steps * v_width);
      rows.lane->set_value_norms(block.layer, rows.first,
                                 norms_of(block.layer, {v, n}, rows.steps));
    }
    if (gated_retention(*rows.lane)) {
      rows.lane->set_retention(block.layer, rows.first,
                               retention_of(block.layer, k, v, rows.steps));
    }
    rows.lane->run_layer(block.layer, {rows.first, rows.steps, q, k, v, o});
  } catch (const std::exception& e) {
    rows.lane->fail(fmt::format("{}: sequence {}, layer {}: {}", trace_.path(), info_.id,
                                block.layer, e.what()));
  }
}

void closed_loop_pass::score_rows(std::span<const lane_rows> rows, std::span<const float> residual,
                                  std::span<const float> reference, bool with_reference) {
  const std::int64_t hidden = model_.config().hidden_size;
  std::int64_t last = block_first_;
  for (const auto& part : rows) last = std::max(last, part.first + part.steps);
  std::vector<scored_position> positions;
  // In a free run a block is one position.
  const token_choice choice{options_.free.temperature,
                            tracer::uniform_at(options_.free.seed, block_first_ + 1)};
  for (std::int64_t t = block_first_; t < last; ++t) {
    scored_position at;
    at.position = t;
    at.next = token_after(t);
    if (free()) at.choice = &choice;
    at.reference = reference.data() + (t - block_first_) * hidden;
    if (with_reference) {
      at.reference_out = &full_scores_[static_cast<size_t>(t - info_.n_prompt + 1)];
      if (!recorded_logits_.empty()) {
        at.recorded =
            &recorded_logits_[static_cast<size_t>((t - block_first_) * trace_model_.logit_size)];
        at.recorded_kl = &recorded_kl_[static_cast<size_t>(t - info_.n_prompt)];
      }
    }
    for (const auto& part : rows) {
      if (part.lane == nullptr || t < part.first || t >= part.first + part.steps) continue;
      at.rows.push_back({residual.data() + (part.row + t - part.first) * hidden,
                         &part.lane->state().policy().budget.gate, part.lane->score(t)});
    }
    if (with_reference || !at.rows.empty()) positions.push_back(std::move(at));
  }
  score_logits(model_, positions);
}

void closed_loop_pass::report_progress(std::int64_t layer_rows) {
  progress_done_ = std::min(progress_done_ + layer_rows, progress_total_);
  if (options_.progress) options_.progress(progress_done_, progress_total_);
}

std::string free_run_note(const free_run& run) {
  return fmt::format("free-running: {} tokens, temperature {}, seed {}", run.tokens,
                     run.temperature, run.seed);
}

std::vector<lane_output> replay_closed(const traces::reader& trace, int sequence,
                                       const tracer::model& model,
                                       std::span<const policies::policy> policies,
                                       const closed_loop_options& options) {
  return closed_loop_pass(trace, sequence, model, policies, options).run();
}

}  // namespace kvreplay::replay
