// One declaration per parameter: name, default, range, unit and help, read in the same line.
// The reader runs in two modes: reading a SPEC's values, or only collecting the declarations for
// the manual page, so that page and parser cannot disagree.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policies/policy.hpp"

namespace kvreplay::policies {

struct param_doc {
  std::string name, default_text, range_text, help;
};

class param_reader {
 public:
  // `owner` names the policy or modifier in errors. `given` are the key=value pairs of the SPEC.
  param_reader(std::string owner, std::vector<std::pair<std::string, std::string>> given);

  int integer(std::string_view key, int fallback, int low, int high, std::string_view help);
  double real(std::string_view key, double fallback, double low, double high, std::string_view help);
  std::uint64_t seed(std::string_view key, std::string_view help);  // default 0
  // Index into `choices`; the first is the default unless `fallback` says otherwise.
  int choice(std::string_view key, std::vector<std::string_view> choices, std::string_view help,
             int fallback = 0);
  // 512 | 20% | 64MiB. `required`: no default, its absence is an error.
  amount size(std::string_view key, bool required, std::string_view help);
  bool has(std::string_view key) const;

  // Throws spec_error for keys nobody declared, with the nearest declared one as a hint.
  void finish() const;

  const std::vector<param_doc>& docs() const { return docs_; }
  // Every declared parameter with its resolved value as text, in order of declaration.
  const std::vector<std::pair<std::string, std::string>>& resolved() const { return resolved_; }

 private:
  const std::string* take(std::string_view key);
  std::string owner_;
  std::map<std::string, std::string, std::less<>> given_;
  std::vector<std::string> used_;
  std::vector<param_doc> docs_;
  std::vector<std::pair<std::string, std::string>> resolved_;
};

std::string amount_text(const amount& a);  // "512", "20%", "64MiB"

}  // namespace kvreplay::policies
