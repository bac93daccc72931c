// The manual pages, made from the declarations of the catalogue.
#include <fmt/format.h>

#include <algorithm>

#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

constexpr size_t page_width = 80;

// `text` broken at spaces into lines of at most page_width, each indented by `indent` spaces.
std::string paragraph(std::string_view text, size_t indent) {
  std::string out, line(indent, ' ');
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string_view word = text.substr(at, end - at);
    if (line.size() > indent && line.size() + 1 + word.size() > page_width) {
      out += line + "\n";
      line.assign(indent, ' ');
    }
    if (line.size() > indent) line += ' ';
    line += word;
    at = end + 1;
  }
  return out + line + "\n";
}

std::string section(std::string_view title, std::string_view body) {
  return body.empty() ? "" : fmt::format("\n{}\n{}", title, paragraph(body, 4));
}

std::string first_sentence(std::string_view text) {
  const size_t end = text.find(". ");
  return std::string(end == std::string_view::npos ? text : text.substr(0, end + 1));
}

std::string parameter_section(const entry& e) {
  std::string out = "\nPARAMETERS\n";
  const std::vector<param_doc> docs = entry_params(e);
  if (docs.empty()) return out + "    none\n";
  for (const param_doc& doc : docs) {
    out += fmt::format("    {}=  [{}]  {}\n{}", doc.name, doc.default_text, doc.range_text,
                       paragraph(doc.help, 8));
  }
  return out;
}

std::string modifier_section(const entry& e) {
  if (e.kind != "policy") return "";
  std::string names;
  for (const entry& other : catalogue()) {
    if (!fits(e, other)) continue;
    names += fmt::format("{}+{}", names.empty() ? "" : " ", other.name);
  }
  return section("MODIFIERS", names);
}

std::string page(const entry& e) {
  return fmt::format("{} ({})\n", e.name, e.kind) + paragraph(e.idea, 4) +
         section("SOURCE", e.source) + parameter_section(e) + section("NEEDS", e.needs) +
         section("DEVIATIONS", e.deviations) + modifier_section(e) + section("EXAMPLE", e.example);
}

}  // namespace

std::string manual_page(std::string_view name) {
  const entry* policy = find_entry(name, true);
  const entry* modifier = find_entry(name, false);
  if (policy == nullptr && modifier == nullptr) {
    throw spec_error(fmt::format("unknown policy or modifier {}{}", quoted(name),
                                 did_you_mean(name, entry_names())));
  }
  std::string out = policy == nullptr ? "" : page(*policy);
  if (policy != nullptr && modifier != nullptr) out += "\n";
  return out + (modifier == nullptr ? "" : page(*modifier));
}

std::string catalogue_table() {
  std::string out;
  for (const entry& e : catalogue()) {
    out +=
        fmt::format("{:<13} {:<10} {:<34} {}\n", e.name, e.kind, e.source, first_sentence(e.idea));
  }
  return out;
}

}  // namespace kvreplay::policies
