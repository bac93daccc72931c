// Kept sets against a slow, separate implementation, on three random traces.
#include "replay/slow_policies.hpp"

#include <doctest/doctest.h>

#include <fstream>

#include "replay/policy_files.hpp"
#include "replay/test_support.hpp"

namespace kvreplay::replay {
namespace {

TEST_CASE("every policy keeps what its definition says") {
  for (const auto& [kind, seed] :
       {std::pair{trace_kind::grouped, 31}, {trace_kind::windowed, 32}, {trace_kind::sinks, 33}}) {
    CAPTURE(seed);
    temporary_folder folder;
    auto made = options_for(kind, static_cast<std::uint64_t>(seed));
    made.retention = made.value_norm = made.wo = true;
    made.layers = 2;
    if (kind == trace_kind::windowed) made.window = {0, 20};
    made.prompt_length = 36;
    made.tokens = 72;
    traces::synth(folder / "t.h5", made);
    const traces::reader trace(folder / "t.h5");
    std::ofstream(folder / "heads.json")
        << R"({"schema": "kvreplay.headscores/1", "scores": [[1,5,2,0,3,1],[4,4,1,9,0,2]]})";
    std::vector<std::string> specs{"window:budget=9",
                                   "streaming:budget=9",
                                   "h2o:budget=9",
                                   "h2o:budget=9,gqa=max",
                                   "h2o:budget=25%,gqa=sum,scope=head",
                                   "tova:budget=9",
                                   "tova:budget=9,scope=head,gqa=max",
                                   "scissorhands:budget=12,history=11,recent=3",
                                   "scissorhands:budget=9,history=200,drop=0.3,recent=4",
                                   "snapkv:budget=12,obs=4",
                                   "snapkv:budget=12,obs=5,kernel=3,pool=avg,gqa=max",
                                   "snapkv:budget=12,obs=4,kernel=5+every:n=1",
                                   "snapkv:budget=12,obs=4,scope=layer+every:n=3",
                                   "pyramidkv:budget=12,obs=4+every:n=1",
                                   "adakv:budget=12,obs=4",
                                   "adakv:budget=12,obs=4,floor=0.5+every:n=2",
                                   "adakv:budget=12,obs=4,mode=blend+every:n=1",
                                   "h2o:budget=9+adakv:floor=0",
                                   "rkv:budget=12,obs=4,lambda=0.3+every:n=6",
                                   "rkv:budget=12,obs=3,kernel=3+every:n=1",
                                   "trimkv:budget=9",
                                   "trimkv:budget=9,age_offset=2",
                                   "dbtrimkv:budget=9",
                                   "dbtrimkv:budget=9,floor=4,age_offset=2",
                                   "h2o:budget=9+global:floor=2",
                                   "oracle:budget=9",
                                   "oracle:budget=9,gqa=max,scope=head",
                                   "knorm:budget=9",
                                   "keydiff:budget=9",
                                   "h2o:budget=12+critical",
                                   "snapkv:budget=12,obs=4+critical:first=0.25,epsilon=0+every:n=2",
                                   "adakv:budget=14,obs=4+critical+every:n=1",
                                   "tova:budget=9+critical",
                                   "trimkv:budget=9,score=exp+critical:first=0",
                                   "h2o:budget=20%+protect:sinks=2,recent=3"};
    for (const char* spec :
         {"headkv:budget=12,obs=4,table=", "headkv:budget=14,obs=2,beta=3,table="}) {
      specs.push_back(spec + (folder / "heads.json") + "+every:n=1");
    }
    const auto policies = parse_all(specs);
    open_loop_options options;
    options.kept = true;
    options.quality = false;
    const auto lanes = replay_open(trace, 0, policies, options);
    for (size_t i = 0; i < specs.size(); ++i) {
      CAPTURE(specs[i]);
      REQUIRE_MESSAGE(lanes[i].row.status == "ok", lanes[i].row.note);
      const auto& m = trace.model();
      const auto policy = with_files(policies[i], m.n_layers, m.n_q_heads, m.n_kv_heads, 0);
      CHECK(kept_sets(trace, lanes[i]) == slow_replay(trace, policy).run());
    }
  }
}

}  // namespace
}  // namespace kvreplay::replay
