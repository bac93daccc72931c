// A small trace for tests in which every score is chosen.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/half.hpp"
#include "traces/writer.hpp"

namespace kvreplay::replay {

// A trace whose key t is the t-th unit vector, so that q[i] is the score of position i. Query heads
// share one KV head.
class one_hot_trace {
 public:
  one_hot_trace(int q_heads, int n_prompt, int n_tokens)
      : heads_(q_heads),
        prompt_(n_prompt),
        tokens_(n_tokens),
        q_(static_cast<size_t>(n_tokens * q_heads * n_tokens)) {}

  void look(int t, int head, int at, float score) {
    q_[static_cast<size_t>((t * heads_ + head) * tokens_ + at)] = kernels::float_to_half(score);
  }

  // A named range of positions, half-open.
  void span(const std::string& name, int begin, int end) { spans_[name].push_back({begin, end}); }

  void write(const std::string& path) const {
    traces::model_info model;
    model.name = model.architecture = "test";
    model.n_layers = model.n_kv_heads = 1;
    model.n_q_heads = heads_;
    model.head_dim = model.value_dim = tokens_;
    model.hidden_size = 8;
    model.vocab_size = model.logit_size = 4;
    model.layers = {0};
    model.window = {0};
    traces::writer out(path, model, "test");
    traces::sequence_plan plan;
    plan.n_prompt = prompt_;
    plan.n_tokens = tokens_;
    plan.o = plan.lse = false;
    plan.spans = spans_;
    out.begin_sequence(plan);
    out.put_tokens(0, std::vector<std::int32_t>(static_cast<size_t>(tokens_), 1));
    std::vector<traces::half_bits> unit(static_cast<size_t>(tokens_ * tokens_));
    for (int t = 0; t < tokens_; ++t) {
      unit[static_cast<size_t>(t * tokens_ + t)] = kernels::float_to_half(1);
    }
    out.put_q(0, 0, q_);
    out.put_k(0, 0, unit);
    out.put_v(0, 0, unit);
    out.commit(tokens_);
    out.end_sequence();
    out.finish();
  }

 private:
  int heads_, prompt_, tokens_;
  std::vector<traces::half_bits> q_;
  std::map<std::string, std::vector<std::pair<int, int>>> spans_;
};

}  // namespace kvreplay::replay
