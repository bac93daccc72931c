// headkv: budgets per head from a table measured beforehand.
// Paper: HeadKV, arXiv 2410.19258. Idea: few heads retrieve from the context; give them the
// entries that the others do not need.
// Deviations: the table is per query head and summed over the query heads of a KV head.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply_policy(param_reader& params, policy& out) {
  read_snapkv(params, out);
  read_headkv(params, out);
}

constexpr std::string_view table_needs =
    "a table of head scores in JSON, as kvreplay headscore measures it: {\"schema\": "
    "\"kvreplay.headscores/1\", \"scores\": [layers][query heads]}";

}  // namespace

void read_headkv(param_reader& params, policy& out) {
  start_division(out, "headkv", division_kind::table);
  division_rule& rule = out.budget.division;
  rule.file = params.text("table", "JSON file with a score for every query head");
  rule.beta = params.real("beta", 1.5, 1, 1e6,
                          "every head gives floor(F / beta) entries into the pool that the table "
                          "shares out; F is the budget less the protected entries");
}

entry headkv_entry() {
  return {.name = "headkv",
          .kind = "policy",
          .idea =
              "snapkv with a budget for every head: each gives a part into a pool, which a table "
              "of retrieval scores shares out. The observation window is added back to every head.",
          .source = "HeadKV, arXiv 2410.19258",
          .needs = table_needs,
          .deviations = "Scores of query heads are summed over the group of a KV head.",
          .example = "headkv:budget=512,table=heads.json",
          .trigger = "prefill",
          .apply = apply_policy};
}

entry headkv_modifier() {
  return {.name = "headkv",
          .kind = "modifier",
          .slot = "division of the budget",
          .idea =
              "Gives every head a budget from a table of head scores, at nearly the same total. "
              "Usable on every policy that ranks entries.",
          .source = "HeadKV, arXiv 2410.19258",
          .needs = table_needs,
          .deviations = "Scores of query heads are summed over the group of a KV head.",
          .example = "h2o:budget=512+headkv:table=heads.json",
          .apply = read_headkv};
}

}  // namespace kvreplay::policies
