#include "replay/labels.hpp"

#include <doctest/doctest.h>

#include "policies/policy.hpp"

namespace kvreplay::replay {
namespace {

std::string label(const char* spec) {
  const auto policy = policies::parse_policy(spec);
  reports::result row;
  row.policy = policy.resolved;
  row.name = policy.name;
  row.params = policy.params;
  row.precision = policy.precision_name;
  return labels_of({&row, 1})[0];
}

TEST_CASE("a label is the SPEC with what is not as by default") {
  CHECK(label("h2o:budget=16,heavy=0.5") == "h2o:budget=16");
  CHECK(label("streaming:budget=16+rerotate") == "streaming:budget=16+rerotate");
  CHECK(label("h2o:budget=16+prefill+int8") == "h2o:budget=16+prefill");
  CHECK(label("snapkv:budget=16") == "snapkv:budget=16");
  CHECK(label("snapkv:budget=16+every:n=1") == "snapkv:budget=16+every:n=1");
  CHECK(label("rkv:budget=16") == "rkv:budget=16+every:n=128");
  CHECK(label("headkv:budget=16,table=a.json") == "headkv:budget=16,table=a.json");
  CHECK(label("kept:file=k.csv") == "kept:file=k.csv");
  CHECK(label("h2o:budget=9+critical") == "h2o:budget=9+critical:first=0.5");
}

}  // namespace
}  // namespace kvreplay::replay
