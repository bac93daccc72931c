#include "policies/grid.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>

#include "policies/catalogue.hpp"
#include "policies/params.hpp"

namespace kvreplay::policies {
namespace {

constexpr std::int64_t most_points = 100'000;

struct number {
  double value = 0;
  int decimals = 0;
  std::string unit;  // "", "%", "MiB" ...
};

std::optional<number> read_number(std::string_view text) {
  number out;
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(begin, end, out.value);
  if (error != std::errc{} || !std::isfinite(out.value)) return std::nullopt;
  const std::string_view digits(begin, static_cast<size_t>(rest - begin));
  const auto exponent = digits.find_first_of("eE");
  const auto mantissa = digits.substr(0, exponent);
  const auto dot = mantissa.find('.');
  if (dot != std::string_view::npos) out.decimals = static_cast<int>(mantissa.size() - dot - 1);
  if (exponent != std::string_view::npos) {
    int power = 0;
    std::from_chars(digits.data() + exponent + (digits[exponent + 1] == '+' ? 2 : 1), rest, power);
    out.decimals = std::clamp(out.decimals - power, 0, 17);
  }
  out.unit.assign(rest, end);
  const bool unit_is_word = std::all_of(out.unit.begin(), out.unit.end(), [](char c) {
    return c == '%' || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  });
  if (!unit_is_word) return std::nullopt;
  return out;
}

// `value` with as many decimals as its range was written with, without trailing zeros.
std::string written(double value, int decimals, const std::string& unit) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  if (text.find('.') != std::string::npos) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
  }
  if (text == "-0") text = "0";
  return text + unit;
}

std::vector<std::string_view> split(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> out;
  size_t start = 0;
  for (size_t end; (end = text.find(separator, start)) != std::string_view::npos;
       start = end + separator.size()) {
    out.push_back(text.substr(start, end - start));
  }
  out.push_back(text.substr(start));
  return out;
}

void add_range(std::string_view text, std::string_view what, std::vector<std::string>& out) {
  const auto parts = split(text, "..");
  std::vector<number> numbers;
  for (const auto part : parts) {
    const auto n = read_number(part);
    if (!n || parts.size() > 3) {
      throw spec_error(fmt::format("{}: {} is no range; expected first..last or first..last..step",
                                   what, quoted(text)));
    }
    numbers.push_back(*n);
  }
  if (numbers.size() == 2) numbers.push_back({1, 0, numbers[0].unit});
  const auto &first = numbers[0], &last = numbers[1], &step = numbers[2];
  if (first.unit != last.unit || first.unit != step.unit) {
    throw spec_error(
        fmt::format("{}: {} mixes units; write the same on every number", what, quoted(text)));
  }
  if (parts.size() == 2 && (first.decimals > 0 || last.decimals > 0)) {
    throw spec_error(fmt::format("{}: {} needs a step: first..last..step", what, quoted(text)));
  }
  if (step.value == 0) throw spec_error(fmt::format("{}: {} has step 0", what, quoted(text)));
  const double steps = (last.value - first.value) / step.value;
  if (steps < -1e-9) {
    throw spec_error(fmt::format("{}: {}: the step leads away from the end", what, quoted(text)));
  }
  if (!(steps < static_cast<double>(most_points))) {
    throw spec_error(
        fmt::format("{}: {} has more than {} points", what, quoted(text), most_points));
  }
  const auto count = static_cast<std::int64_t>(std::floor(steps + 0.5)) + 1;
  const int decimals = std::max({first.decimals, last.decimals, step.decimals});
  for (std::int64_t i = 0; i < count; ++i) {
    out.push_back(written(first.value + static_cast<double>(i) * step.value, decimals, first.unit));
  }
}

void refuse_twins(const std::vector<std::string>& values, std::string_view what) {
  std::set<std::string> seen;
  for (const auto& value : values) {
    if (seen.insert(value).second) continue;
    throw spec_error(fmt::format("{}: the value {} stands twice", what, quoted(value)));
  }
}

bool is_numeric(const entry& e, std::string_view key) {
  const auto docs = entry_params(e);
  const auto at =
      std::find_if(docs.begin(), docs.end(), [&](const param_doc& d) { return d.name == key; });
  return at != docs.end() && at->numeric;
}

}  // namespace

std::vector<std::string> range_values(std::string_view text, std::string_view what) {
  std::vector<std::string> out;
  for (const auto item : split(text, "/")) {
    if (item.empty()) {
      throw spec_error(fmt::format("{}: {} has an empty value", what, quoted(text)));
    }
    if (item.find("..") != std::string_view::npos) {
      add_range(item, what, out);
    } else {
      out.emplace_back(item);
    }
  }
  refuse_twins(out, what);
  return out;
}

// Walks the SPEC parameter by parameter; what is no axis is copied as it stands, so that
// parse_policy sees and judges it.
spec_grid::spec_grid(std::string_view spec) {
  fixed_.emplace_back();
  bool base = true;
  for (const auto part : split(spec, "+")) {
    if (!base) fixed_.back() += '+';
    const size_t colon = part.find(':');
    const auto name = part.substr(0, colon);
    fixed_.back() += name;
    const entry* what = find_entry(name, base);
    if (colon != std::string_view::npos) {
      char separator = ':';
      for (const auto item : split(part.substr(colon + 1), ",")) {
        fixed_.back() += separator;
        separator = ',';
        const size_t equals = item.find('=');
        const auto key = item.substr(0, equals);
        const bool numeric =
            what != nullptr && equals != std::string_view::npos && is_numeric(*what, key);
        if (!numeric) {
          fixed_.back() += item;
          continue;
        }
        const auto axis = base ? std::string(key) : fmt::format("{}.{}", name, key);
        auto values = range_values(item.substr(equals + 1), fmt::format("{}: {}", name, key));
        fixed_.back() += fmt::format("{}=", key);
        if (values.size() == 1) {
          fixed_.back() += values.front();
          continue;
        }
        size_ *= std::ssize(values);
        if (size_ > most_points) {
          throw spec_error(fmt::format("{}: more than {} points", quoted(spec), most_points));
        }
        axes_.push_back({axis, std::move(values)});
        fixed_.emplace_back();
      }
    }
    base = false;
  }
  // Refused as a whole only if every point is: a grid may have corners that make no sense.
  std::string first_complaint;
  for (std::int64_t i = 0; i < size_; ++i) {
    try {
      parse_policy(this->spec(i));
      return;
    } catch (const spec_error& e) {
      if (first_complaint.empty()) first_complaint = e.what();
    }
  }
  throw spec_error(first_complaint);
}

std::string spec_grid::spec(std::span<const int> index) const {
  std::string out = fixed_.front();
  for (size_t a = 0; a < axes_.size(); ++a) {
    out += axes_[a].values[static_cast<size_t>(index[a])];
    out += fixed_[a + 1];
  }
  return out;
}

std::string spec_grid::spec(std::int64_t i) const { return spec(index_of(i)); }

std::vector<int> spec_grid::index_of(std::int64_t i) const {
  std::vector<int> index(axes_.size());
  for (size_t a = axes_.size(); a-- > 0;) {
    const auto count = std::ssize(axes_[a].values);
    index[a] = static_cast<int>(i % count);
    i /= count;
  }
  return index;
}

std::int64_t spec_grid::number_of(std::span<const int> index) const {
  std::int64_t i = 0;
  for (size_t a = 0; a < axes_.size(); ++a) i = i * std::ssize(axes_[a].values) + index[a];
  return i;
}

}  // namespace kvreplay::policies
