#include "policies/params.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

namespace kvreplay::policies {
namespace {

TEST_CASE("text parameters unescape what the grammar uses, and nothing else") {
  param_reader reader("x", {{"file", "a%2Cb%3Ac%2bd%25e=f"}, {"cut", "a%2"}, {"odd", "%41"}});
  CHECK(reader.text("file", "") == "a,b:c+d%e=f");
  CHECK(reader.resolved().back().second == "a%2Cb%3Ac%2Bd%25e=f");
  CHECK(reader.resolved().back().second == "a%2Cb%3Ac%2Bd%25e=f");
  CHECK_THROWS_AS(reader.text("absent", ""), spec_error);
  CHECK_THROWS_AS(reader.text("cut", ""), spec_error);
  CHECK_THROWS_AS(reader.text("odd", ""), spec_error);
}

TEST_CASE("amounts print in the shortest unit that is exact") {
  CHECK(amount_text({amount_unit::entries, 512}) == "512");
  CHECK(amount_text({amount_unit::entries, 2147483647}) == "2147483647");
  CHECK(amount_text({amount_unit::percent, 20}) == "20%");
  CHECK(amount_text({amount_unit::percent, 0.0000001}) == "0.0000001%");
  CHECK(amount_text({amount_unit::bytes, 67108864}) == "64MiB");
  CHECK(amount_text({amount_unit::bytes, 64e6}) == "64MB");
  CHECK(amount_text({amount_unit::bytes, 1572864}) == "1536KiB");
  CHECK(amount_text({amount_unit::bytes, 1234567}) == "1234567B");
}

TEST_CASE("reals print in the shortest form that reads back") {
  CHECK(real_text(0.1) == "0.1");
  CHECK(real_text(1) == "1");
  CHECK(real_text(0.1 + 0.2) == "0.30000000000000004");
  param_reader reader("x", {{"zero", "-0"}});
  CHECK(reader.real("zero", 1, 0, 1, "") == 0);
  CHECK(reader.resolved().back().second == "0");
}

TEST_CASE("documenting declares everything, reads and requires nothing") {
  param_reader reader("x", {{"size", "rubbish"}, {"typo", "1"}}, reader_mode::documenting);
  CHECK(reader.size("size", std::nullopt, "help").value == 1);
  CHECK(!reader.has("size"));
  CHECK(reader.docs().size() == 1);
  CHECK(reader.docs()[0].default_text == "required");
  CHECK_THROWS_AS(reader.finish(), spec_error);
}

TEST_CASE("the hint is the nearest name, or all of them") {
  const std::vector<std::string_view> known{"tau", "high", "low"};
  CHECK(did_you_mean("tua", known) == "; did you mean 'tau'?");
  CHECK(did_you_mean("hihg", known) == "; did you mean 'high'?");
  CHECK(did_you_mean("budget", known) == "; known: tau, high, low");
  CHECK(did_you_mean("x", {}) == "; it takes none");
}

TEST_CASE("quoted is one line whatever it is given") {
  CHECK(quoted("a\nb\x7f") == "'a\\x0ab\\x7f'");
  CHECK(quoted(std::string(100, 'a')) == fmt::format("'{:a<60}...'", ""));
}

}  // namespace
}  // namespace kvreplay::policies
