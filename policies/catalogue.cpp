#include "policies/catalogue.hpp"

#include <fmt/format.h>

#include <array>

namespace kvreplay::policies {

// A new policy: its file NAME.cpp, its name here and in the table below.
entry full_entry(), window_entry(), streaming_entry(), random_entry(), h2o_entry(),
    scissorhands_entry(), tova_entry(), snapkv_entry(), pyramidkv_entry(), adakv_entry(),
    headkv_entry(), rkv_entry(), trimkv_entry(), dbtrimkv_entry(), confkv_entry(), confkv_l_entry(),
    kept_entry(), oracle_entry(), knorm_entry(), keydiff_entry(), fastv_entry(), visionzip_entry();
entry pyramid_entry(), adakv_modifier(), headkv_modifier(), global_entry(), confidence_entry(),
    protect_entry(), critical_entry(), rerotate_entry(), every_entry(), prefill_entry();
entry fp16_entry(), int8_entry(), int4_entry(), paged_entry();

// The order of the modifiers is their order in a resolved string: budget, selection, trigger,
// precision, layout.
std::span<const entry> catalogue() {
  static const std::array table{
      full_entry(),      window_entry(),       streaming_entry(),  random_entry(),
      h2o_entry(),       scissorhands_entry(), tova_entry(),       snapkv_entry(),
      pyramidkv_entry(), adakv_entry(),        headkv_entry(),     rkv_entry(),
      trimkv_entry(),    dbtrimkv_entry(),     confkv_entry(),     confkv_l_entry(),
      kept_entry(),      oracle_entry(),       knorm_entry(),      keydiff_entry(),
      fastv_entry(),     visionzip_entry(),    pyramid_entry(),    adakv_modifier(),
      headkv_modifier(), global_entry(),       confidence_entry(), protect_entry(),
      critical_entry(),  rerotate_entry(),     every_entry(),      prefill_entry(),
      fp16_entry(),      int8_entry(),         int4_entry(),       paged_entry()};
  return table;
}

const entry* find_entry(std::string_view name, bool policy) {
  for (const entry& e : catalogue()) {
    if (e.name == name && (e.kind == "policy") == policy) return &e;
  }
  return nullptr;
}

std::vector<std::string_view> entry_names(std::string_view kind) {
  std::vector<std::string_view> names;
  for (const entry& e : catalogue()) {
    if (kind.empty() || e.kind == kind) names.push_back(e.name);
  }
  return names;
}

std::vector<param_doc> entry_params(const entry& e) {
  param_reader reader(std::string(e.name), {}, reader_mode::documenting);
  policy scratch;
  e.apply(reader, scratch);
  return reader.docs();
}

bool fits(const entry& base, const entry& modifier) {
  if (modifier.kind == "policy" || (!base.composes && modifier.kind != "precision")) return false;
  policy scratch;
  scratch.budget.gated = modifier.gates;
  param_reader base_reader(std::string(base.name), {}, reader_mode::documenting);
  param_reader modifier_reader(std::string(modifier.name), {}, reader_mode::documenting);
  try {
    base.apply(base_reader, scratch);
    modifier.apply(modifier_reader, scratch);
  } catch (const spec_error&) {
    return false;
  }
  return true;
}

}  // namespace kvreplay::policies
