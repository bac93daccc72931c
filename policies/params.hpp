// One declaration per parameter: name, default, range, unit and help, read in the same line.
// The reader runs in two modes: reading a SPEC's values, or only collecting the declarations for
// the manual page, so that page and parser cannot disagree.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policies/policy.hpp"

namespace kvreplay::policies {

inline constexpr int no_upper_limit = std::numeric_limits<int>::max();

struct param_doc {
  std::string name, default_text, range_text, help;
  bool numeric = true;  // sweep and tune read lists and ranges in it
};

enum class reader_mode : std::uint8_t { reading, documenting };

class param_reader {
 public:
  // `owner` names the policy or modifier in errors. `given` are the key=value pairs of the SPEC;
  // throws spec_error for a key that stands there twice. documenting: no value is read and nothing
  // is required; finish() still finds unknown keys.
  param_reader(std::string owner, std::vector<std::pair<std::string, std::string>> given,
               reader_mode mode = reader_mode::reading);

  // Each declares a parameter and returns its value. All throw spec_error with owner, key, value
  // and the range or form expected. Bounds are inclusive.
  int integer(std::string_view key, int fallback, int low, int high, std::string_view help);
  // A number, or the word that means "none of them", which is the default (shrink=all).
  std::optional<int> integer_or(std::string_view key, std::string_view word, int low, int high,
                                std::string_view help);
  double real(std::string_view key, double fallback, double low, double high,
              std::string_view help);
  // A number, or qX: a quantile with X in 0..1 (tau=q0.7).
  double real_or_quantile(std::string_view key, double fallback, double low, double high,
                          bool& is_quantile, std::string_view help);
  std::uint64_t seed(std::string_view key, std::string_view help);  // default 0
  // Index into `choices`; the first is the default unless `fallback` says otherwise.
  int choice(std::string_view key, std::vector<std::string_view> choices, std::string_view help,
             int fallback = 0);
  // 512 | 20% | 64MiB. Without a fallback the parameter is required.
  amount size(std::string_view key, std::optional<amount> fallback, std::string_view help);
  // Free text, required, in which , : + and % are written %2C %3A %2B %25.
  std::string text(std::string_view key, std::string_view help);

  bool has(std::string_view key) const;
  // The parameter means something only if `condition`: otherwise giving it is an error that names
  // `what` it needs, and it does not stand in the resolved string.
  void only_with(std::string_view key, bool condition, std::string_view what);
  // Throws spec_error about the value of a declared parameter.
  [[noreturn]] void refuse(std::string_view key, std::string_view why) const;

  // Throws spec_error for keys nobody declared, with the nearest declared one as a hint.
  void finish() const;

  const std::vector<param_doc>& docs() const { return docs_; }
  // Every declared parameter with its resolved value as text, in order of declaration.
  const std::vector<std::pair<std::string, std::string>>& resolved() const { return resolved_; }

 private:
  // Declares `key`; returns the value given for it, or null.
  const std::string* declare(std::string_view key, std::string default_text, std::string range_text,
                             std::string_view help);
  void resolve(std::string_view key, std::string value);

  std::string owner_;
  reader_mode mode_;
  std::map<std::string, std::string, std::less<>> given_;
  std::vector<param_doc> docs_;
  std::vector<std::pair<std::string, std::string>> resolved_;
};

std::string amount_text(const amount& a);  // "512", "20%", "64MiB"; reads back to the same amount
std::string real_text(double value);       // the shortest form that reads back to the same double

// `text` in single quotes, fit for a one-line message: control characters escaped, cut at 60 bytes.
std::string quoted(std::string_view text);

// "; did you mean 'budget'?", or "; known: a, b, c" where nothing is near.
std::string did_you_mean(std::string_view word, std::span<const std::string_view> known);

}  // namespace kvreplay::policies
