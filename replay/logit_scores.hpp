// logit_scores: what the logits of some rows say, against the full cache's logits of the same
// positions. Logits are computed in tiles and reduced at once; they are never all held.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/policy.hpp"
#include "tracer/model.hpp"

namespace kvreplay::replay {

// One row of logits, reduced.
struct logit_score {
  double nll = 0;         // -ln p(next token); 0 where there is none
  double kl = 0;          // KL(full || this), nats
  double confidence = 0;  // under the weights and the temperature of `gate`
  std::int32_t argmax = -1;
  std::int32_t chosen = -1;  // the token that a free run goes on with
  bool top1 = false;         // the same argmax as full
  bool hit = false;          // the argmax is the next token
  bool finite = true;  // false: the row holds NaN or an infinity, and nothing else here counts
};

struct token_choice {
  double temperature = 0, uniform = 0;
};

struct scored_row {
  const float* residual = nullptr;  // [hidden_size], before the final norm
  const policies::gate_rule* gate = nullptr;
  logit_score* out = nullptr;
};

// The rows of one position. The reference's own score is written where `reference_out` is given.
struct scored_position {
  std::int64_t position = 0;  // for complaints
  std::int32_t next = -1;     // the token that follows, -1: none
  // Free runs: each row's own choice of what follows, as tracer::choose_token makes it.
  const token_choice* choice = nullptr;
  const float* reference = nullptr;
  logit_score* reference_out = nullptr;
  // The recording's own logits of the position [vocabulary], and where KL(recorded || reference)
  // goes; or null.
  const float* recorded = nullptr;
  double* recorded_kl = nullptr;
  std::vector<scored_row> rows;
};

// Throws std::domain_error naming the position where the reference's logits are not finite. A row's
// bits do not depend on the other rows; a row equal to the reference's has KL 0 exactly.
void score_logits(const tracer::model& model, std::span<const scored_position> positions);

}  // namespace kvreplay::replay
