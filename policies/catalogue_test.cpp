#include "policies/catalogue.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

namespace kvreplay::policies {
namespace {

TEST_CASE("the catalogue has every policy and modifier once") {
  const std::vector<std::string_view> policies{
      "full",      "window", "streaming", "random",  "h2o",    "scissorhands", "tova",   "snapkv",
      "pyramidkv", "adakv",  "headkv",    "rkv",     "trimkv", "dbtrimkv",     "confkv", "confkv-l",
      "kept",      "oracle", "knorm",     "keydiff", "fastv",  "visionzip"};
  const std::vector<std::string_view> modifiers{"pyramid",    "adakv",   "headkv",   "global",
                                                "confidence", "protect", "critical", "rerotate",
                                                "every",      "prefill"};
  CHECK(entry_names("policy") == policies);
  CHECK(entry_names("modifier") == modifiers);
  CHECK(entry_names("precision") == std::vector<std::string_view>{"fp16", "int8", "int4", "paged"});
  CHECK(entry_names().size() == policies.size() + modifiers.size() + 4);
  CHECK(find_entry("h2o", true)->name == "h2o");
  CHECK(find_entry("h2o", false) == nullptr);
  CHECK(find_entry("adakv", true)->kind == "policy");
  CHECK(find_entry("adakv", false)->kind == "modifier");
  CHECK(find_entry("H2O", true) == nullptr);
}

TEST_CASE("a manual page names everything its entry declares") {
  for (const entry& e : catalogue()) {
    CAPTURE(e.name);
    const std::string page = manual_page(e.name);
    const auto has = [&](std::string_view text) { return page.find(text) != std::string::npos; };
    for (const char* title : {"SOURCE", "PARAMETERS", "NEEDS", "EXAMPLE"}) CHECK(has(title));
    CHECK(has(e.source));
    CHECK(has(e.example));
    if (!e.deviations.empty()) CHECK(has("DEVIATIONS"));
    std::set<std::string> names;
    for (const param_doc& doc : entry_params(e)) {
      CAPTURE(doc.name);
      CHECK(names.insert(doc.name).second);
      CHECK(!doc.help.empty());
      CHECK(has("\n    " + doc.name + "=  [" + doc.default_text + "]  " + doc.range_text + "\n"));
    }
    // Two sentences.
    CHECK(e.idea.ends_with('.'));
    CHECK(e.idea.find(". ") != std::string_view::npos);
  }
}

TEST_CASE("the manual lists the modifiers that the parser takes") {
  const std::string confkv = manual_page("confkv"), h2o = manual_page("h2o");
  const auto in_order = [](std::string_view text) {
    std::string flat;
    for (const char c : text) {
      if (c != ' ' && c != '\n') flat += c;
    }
    return flat;
  };
  CHECK(in_order(confkv).find("+pyramid+adakv+headkv+global+protect+critical+rerotate+every"
                              "+prefill+fp16+int8") != std::string::npos);
  CHECK(manual_page("confkv-l").find("+pyramid") == manual_page("confkv-l").rfind("+pyramid"));
  CHECK(in_order(h2o).find("+global+confidence+protect+critical") != std::string::npos);
  CHECK(in_order(manual_page("rkv")).find("+pyramid+headkv+global+confidence+protect+rerotate") !=
        std::string::npos);
  CHECK(in_order(manual_page("kept")).find("MODIFIERS+fp16+int8+int4+paged") != std::string::npos);
  CHECK(manual_page("full").find("+prefill") == std::string::npos);
  CHECK(manual_page("full").find("+fp16 +int8") != std::string::npos);
}

TEST_CASE("an unknown manual page is refused with the nearest name") {
  CHECK_THROWS_WITH_AS(manual_page("tvoa"),
                       "unknown policy or modifier 'tvoa'; did you mean 'tova'?", spec_error);
}

TEST_CASE("the table has one line for each entry") {
  const std::string table = catalogue_table();
  CHECK(std::count(table.begin(), table.end(), '\n') ==
        static_cast<std::ptrdiff_t>(catalogue().size()));
  size_t at = 0;
  for (const entry& e : catalogue()) {
    CAPTURE(e.name);
    CHECK(table.substr(at, e.name.size() + 1) == std::string(e.name) + " ");
    at = table.find('\n', at) + 1;
  }
}

}  // namespace
}  // namespace kvreplay::policies
