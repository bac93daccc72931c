// confidence: the four numbers that CONF-KV's confidence is made of, in one pass over a logit row.
#pragma once

#include <cstdint>
#include <span>

namespace kvreplay::kernels {

struct logit_summary {
  float entropy = 0;  // nats; 0 ln 0 = 0
  float margin = 0;   // ln p1 - ln p2; +inf when only one token is possible
  float top = 0;      // largest probability
  float lse = 0;      // natural log of the sum of exponentials
  double log_z = 0;   // ln sum of e^(x - largest x): lse without its rounding to float
  int argmax = -1;    // the lower id of equal ones
};

// logits [vocab_size], only the real ids. -inf marks an impossible token. Throws std::domain_error
// ("all logits are -inf", "logit 17 is nan") without naming the step, which the caller adds.
logit_summary summarise_logits(std::span<const float> logits);

struct confidence_weights {
  double entropy = 0.4, margin = 0.3, top = 0.3;
};

// c = w_H (1 - H / ln V) + w_m sigmoid(margin) + w_p top, in double from the float32 columns
// (METRICS, Confidence). V = 1 gives 1.
double confidence(float entropy, float margin, float top, int vocab_size,
                  const confidence_weights& weights);

}  // namespace kvreplay::kernels
