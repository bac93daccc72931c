#include "policies/params.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <system_error>

namespace kvreplay::policies {
namespace {

struct byte_unit {
  std::string_view suffix;
  double bytes;
};
// Binary before decimal: of two texts equally short, amount_text takes the first.
constexpr std::array<byte_unit, 7> byte_units{{{"GiB", 1073741824.0},
                                               {"MiB", 1048576.0},
                                               {"KiB", 1024.0},
                                               {"GB", 1e9},
                                               {"MB", 1e6},
                                               {"kB", 1e3},
                                               {"B", 1.0}}};
constexpr double max_bytes = 9007199254740992.0;  // 2^53: whole numbers of bytes stay exact

constexpr std::string_view amount_forms =
    "entries (512), a share of the positions (20%) or bytes "
    "(64MiB)";

// The whole text as a number; nothing before, nothing after. Empty where it is none.
template <typename T>
std::optional<T> whole_number(std::string_view text, std::errc& problem) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  problem = error;
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

// Finite, and a zero never negative.
std::optional<double> real_number(std::string_view text) {
  std::errc problem{};
  const std::optional<double> value = whole_number<double>(text, problem);
  if (!value || !std::isfinite(*value)) return std::nullopt;
  return *value == 0 ? 0.0 : *value;
}

// Digits with at most one point: no sign, no exponent.
std::optional<double> plain_decimal(std::string_view text) {
  if (text.find_first_not_of("0123456789.") != std::string_view::npos) return std::nullopt;
  return real_number(text);
}

std::string integer_range(int low, int high) {
  return high == no_upper_limit ? fmt::format("{}..", low) : fmt::format("{}..{}", low, high);
}

std::string real_range(double low, double high) { return real_text(low) + ".." + real_text(high); }

std::string fixed_text(double value) {
  std::array<char, 400> buffer{};
  const auto result =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed);
  return {buffer.data(), result.ptr};
}

// Either an amount, or (in `why`) what is wrong with the text.
std::optional<amount> percent_amount(std::string_view number, std::string& why) {
  const std::optional<double> value = plain_decimal(number);
  if (!value || *value <= 0 || *value > 100) {
    why = "a share must be above 0% and at most 100%";
    return std::nullopt;
  }
  return amount{amount_unit::percent, *value};
}

std::optional<amount> byte_amount(std::string_view number, const byte_unit& unit,
                                  std::string& why) {
  const std::optional<double> value = plain_decimal(number);
  const double bytes = value ? std::floor(*value * unit.bytes) : 0;
  if (bytes < 1 || bytes > max_bytes) {
    why = "bytes must be a number from 1B to 8388608GiB with KiB, MiB, GiB, kB, MB or GB";
    return std::nullopt;
  }
  return amount{amount_unit::bytes, bytes};
}

std::optional<amount> entry_amount(std::string_view text, std::string& why) {
  std::errc problem{};
  const std::optional<int> value = whole_number<int>(text, problem);
  if (value && *value >= 1) return amount{amount_unit::entries, static_cast<double>(*value)};
  const std::optional<double> decimal = plain_decimal(text);
  if (value || problem == std::errc::result_out_of_range) {
    why = fmt::format("entries must lie in 1..{}", no_upper_limit);
  } else if (decimal && *decimal > 0 && *decimal <= 1) {
    why = fmt::format("neither entries nor a share; for that share of the positions write {:g}%",
                      *decimal * 100);
  } else {
    why = fmt::format("expected {}", amount_forms);
  }
  return std::nullopt;
}

std::optional<amount> parse_amount(std::string_view text, std::string& why) {
  if (text.ends_with('%')) return percent_amount(text.substr(0, text.size() - 1), why);
  for (const byte_unit& unit : byte_units) {
    if (text.ends_with(unit.suffix)) {
      return byte_amount(text.substr(0, text.size() - unit.suffix.size()), unit, why);
    }
  }
  return entry_amount(text, why);
}

constexpr std::string_view escaped_characters = ",:+%";

std::string escape(std::string_view plain) {
  std::string out;
  for (const char c : plain) {
    if (escaped_characters.find(c) == std::string_view::npos) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

std::optional<std::string> unescape(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    unsigned char code = 0;
    const std::string_view digits = text.substr(i + 1, 2);
    const auto [stop, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (error != std::errc{} || stop != digits.data() + 2) return std::nullopt;
    if (escaped_characters.find(static_cast<char>(code)) == std::string_view::npos) {
      return std::nullopt;
    }
    out += static_cast<char>(code);
    i += 2;
  }
  return out;
}

// Edits (insert, delete, replace, swap of neighbours) that lead from a to b.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) above[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, above[j] + 1, row[j - 1] + 1});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = above;
    above = row;
  }
  return above[b.size()];
}

}  // namespace

std::string real_text(double value) {
  std::array<char, 40> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), result.ptr};
}

std::string amount_text(const amount& a) {
  switch (a.unit) {
    case amount_unit::everything:
      return "everything";
    case amount_unit::entries:
      return fixed_text(a.value);
    case amount_unit::percent:
      return fixed_text(a.value) + "%";
    case amount_unit::bytes:
      break;
  }
  std::string best;
  for (const byte_unit& unit : byte_units) {
    if (std::fmod(a.value, unit.bytes) != 0) continue;
    std::string text = fixed_text(a.value / unit.bytes).append(unit.suffix);
    if (best.empty() || text.size() < best.size()) best = std::move(text);
  }
  return best;
}

std::string quoted(std::string_view text) {
  constexpr size_t longest = 60;
  std::string out = "'";
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (text.size() > longest ? "...'" : "'");
}

std::string did_you_mean(std::string_view word, std::span<const std::string_view> known) {
  // A word in a hostile SPEC may be long; nothing that long is near a name.
  size_t best = word.size() > 64 ? 0 : (word.size() + 2) / 3 + 1;
  std::string_view nearest;
  for (const std::string_view name : known) {
    if (best == 0) break;
    const size_t distance = edit_distance(word, name);
    if (distance < best) {
      best = distance;
      nearest = name;
    }
  }
  if (!nearest.empty()) return fmt::format("; did you mean '{}'?", nearest);
  return known.empty() ? "; it takes none" : fmt::format("; known: {}", fmt::join(known, ", "));
}

param_reader::param_reader(std::string owner,
                           std::vector<std::pair<std::string, std::string>> given, reader_mode mode)
    : owner_(std::move(owner)), mode_(mode) {
  for (auto& [key, value] : given) {
    const auto [place, added] = given_.emplace(key, value);
    if (!added) {
      throw spec_error(fmt::format("{}: {} is given twice, as {} and {}", owner_, quoted(key),
                                   quoted(place->second), quoted(value)));
    }
  }
}

const std::string* param_reader::declare(std::string_view key, std::string default_text,
                                         std::string range_text, std::string_view help) {
  docs_.push_back(
      {std::string(key), std::move(default_text), std::move(range_text), std::string(help)});
  if (mode_ == reader_mode::documenting) return nullptr;
  const auto found = given_.find(key);
  return found == given_.end() ? nullptr : &found->second;
}

void param_reader::resolve(std::string_view key, std::string value) {
  resolved_.emplace_back(key, std::move(value));
}

bool param_reader::has(std::string_view key) const {
  return mode_ == reader_mode::reading && given_.find(key) != given_.end();
}

void param_reader::refuse(std::string_view key, std::string_view why) const {
  const auto found = given_.find(key);
  const std::string value = found == given_.end() ? "" : quoted(found->second);
  throw spec_error(fmt::format("{}: {}={}: {}", owner_, key, value, why));
}

void param_reader::only_with(std::string_view key, bool condition, std::string_view what) {
  if (condition) return;
  if (has(key)) refuse(key, fmt::format("means something only with {}", what));
  std::erase_if(resolved_, [&](const auto& pair) { return pair.first == key; });
}

int param_reader::integer(std::string_view key, int fallback, int low, int high,
                          std::string_view help) {
  const std::string range = integer_range(low, high);
  int value = fallback;
  if (const std::string* given = declare(key, fmt::to_string(fallback), range, help)) {
    std::errc problem{};
    const std::optional<int> number = whole_number<int>(*given, problem);
    if (!number || *number < low || *number > high) {
      refuse(key, fmt::format("expected a whole number in {}", range));
    }
    value = *number;
  }
  resolve(key, fmt::to_string(value));
  return value;
}

std::optional<int> param_reader::integer_or(std::string_view key, std::string_view word, int low,
                                            int high, std::string_view help) {
  const std::string range = fmt::format("{} or {}", word, integer_range(low, high));
  std::optional<int> value;
  const std::string* given = declare(key, std::string(word), range, help);
  if (given != nullptr && *given != word) {
    std::errc problem{};
    value = whole_number<int>(*given, problem);
    if (!value || *value < low || *value > high) {
      refuse(key,
             fmt::format("expected '{}' or a whole number in {}", word, integer_range(low, high)));
    }
  }
  resolve(key, value ? fmt::to_string(*value) : std::string(word));
  return value;
}

double param_reader::real(std::string_view key, double fallback, double low, double high,
                          std::string_view help) {
  const std::string range = real_range(low, high);
  double value = fallback;
  if (const std::string* given = declare(key, real_text(fallback), range, help)) {
    const std::optional<double> number = real_number(*given);
    if (!number || *number < low || *number > high) {
      refuse(key, fmt::format("expected a number in {}", range));
    }
    value = *number;
  }
  resolve(key, real_text(value));
  return value;
}

double param_reader::real_or_quantile(std::string_view key, double fallback, double low,
                                      double high, bool& is_quantile, std::string_view help) {
  const std::string range = fmt::format("{} or q0..q1", real_range(low, high));
  double value = fallback;
  is_quantile = false;
  if (const std::string* given = declare(key, real_text(fallback), range, help)) {
    is_quantile = given->starts_with('q');
    const std::optional<double> number =
        real_number(std::string_view(*given).substr(is_quantile ? 1 : 0));
    if (!number || *number < (is_quantile ? 0 : low) || *number > (is_quantile ? 1 : high)) {
      refuse(key, fmt::format("expected a number in {}, or a quantile in q0..q1",
                              real_range(low, high)));
    }
    value = *number;
  }
  resolve(key, fmt::format("{}{}", is_quantile ? "q" : "", real_text(value)));
  return value;
}

std::uint64_t param_reader::seed(std::string_view key, std::string_view help) {
  constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t value = 0;
  if (const std::string* given = declare(key, "0", "0..2^64-1", help)) {
    std::errc problem{};
    const auto number = whole_number<std::uint64_t>(*given, problem);
    if (!number) refuse(key, fmt::format("expected a whole number in 0..{}", largest));
    value = *number;
  }
  resolve(key, fmt::to_string(value));
  return value;
}

int param_reader::choice(std::string_view key, std::vector<std::string_view> choices,
                         std::string_view help, int fallback) {
  auto chosen = choices.begin() + fallback;
  const std::string* given =
      declare(key, std::string(*chosen), fmt::format("{}", fmt::join(choices, " | ")), help);
  docs_.back().numeric = false;
  if (given != nullptr) {
    chosen = std::find(choices.begin(), choices.end(), *given);
    if (chosen == choices.end()) {
      refuse(key, fmt::format("expected {}{}", fmt::join(choices, " | "),
                              did_you_mean(*given, choices)));
    }
  }
  resolve(key, std::string(*chosen));
  return static_cast<int>(chosen - choices.begin());
}

amount param_reader::size(std::string_view key, std::optional<amount> fallback,
                          std::string_view help) {
  amount value = fallback.value_or(amount{amount_unit::entries, 1});
  const std::string* given =
      declare(key, fallback ? amount_text(*fallback) : "required",
              "N entries, N% of the positions so far, or N bytes (kB MB GB KiB MiB GiB)", help);
  if (given != nullptr) {
    std::string why;
    const std::optional<amount> parsed = parse_amount(*given, why);
    if (!parsed) refuse(key, why);
    value = *parsed;
  } else if (!fallback && mode_ == reader_mode::reading) {
    throw spec_error(fmt::format("{}: {}= is required: {}", owner_, key, amount_forms));
  }
  resolve(key, amount_text(value));
  return value;
}

std::string param_reader::text(std::string_view key, std::string_view help) {
  const std::string* given = declare(key, "required", "text", help);
  docs_.back().numeric = false;
  if (given == nullptr && mode_ == reader_mode::reading) {
    throw spec_error(fmt::format("{}: {}= is required: {}", owner_, key, help));
  }
  std::optional<std::string> plain = given == nullptr ? "" : unescape(*given);
  if (!plain) refuse(key, "in text, '%' may only stand in %2C %3A %2B %25");
  resolve(key, escape(*plain));
  return *plain;
}

void param_reader::finish() const {
  std::vector<std::string_view> known;
  for (const param_doc& doc : docs_) known.emplace_back(doc.name);
  for (const auto& [key, value] : given_) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      throw spec_error(fmt::format("{}: unknown key {} (value {}){}", owner_, quoted(key),
                                   quoted(value), did_you_mean(key, known)));
    }
  }
}

}  // namespace kvreplay::policies
