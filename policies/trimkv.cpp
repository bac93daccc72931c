// trimkv: entries fade at a learned rate.
// Paper: TrimKV, arXiv 2512.03324. Idea: a small gate says for each new entry how fast it will be
// forgotten, beta; an entry of age a is worth beta^a.
// Deviations: age_offset is 0; the released code has 2 at the moment of its eviction.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {

void read_trimkv(param_reader& params, policy& out) {
  read_budget(params, out);
  out.score.age_offset =
      params.real("age_offset", 0, 0, 1e6, "added to the age t - position, in steps");
  out.score.exponential = params.choice("score", {"log", "exp"},
                                        "(age + age_offset) log beta, or exp of it, which adakv "
                                        "and critical can share out") == 1;
  out.score.kind = score_kind::retention;
}

entry trimkv_entry() {
  return {.name = "trimkv",
          .kind = "policy",
          .idea =
              "Keeps the entries of which a learned retention says that most is left: (age + "
              "age_offset) log beta. Nothing is protected; the newest is worth most anyway.",
          .source = "TrimKV, arXiv 2512.03324",
          .needs = "retention, from a gate-equipped model or kvreplay fit-retention",
          .deviations = "age_offset is 0; the released code has 2 at its eviction time.",
          .example = "trimkv:budget=512",
          .apply = read_trimkv};
}

}  // namespace kvreplay::policies
