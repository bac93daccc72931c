#include "reports/text.hpp"

#include <doctest/doctest.h>

#include "reports/test_support.hpp"

using namespace kvreplay::reports;

TEST_CASE("bytes come back from every way of escaping") {
  for (const std::string& text : testing::nasty_texts()) {
    for (const controls stay : {controls::keep, controls::lines, controls::none}) {
      CHECK(unescape_bytes(escape_bytes(text, stay)) == text);
    }
  }
  // All pairs and triples over bytes that matter for well-formedness and for the escape itself.
  const std::string bytes = "\\x4a \x7f\x80\x8f\x90\x9f\xa0\xbf\xc1\xc2\xe0\xed\xef\xf0\xf4\xf5";
  for (const char a : bytes) {
    for (const char b : bytes) {
      for (const char c : bytes) {
        const std::string text = {a, b, c};
        CHECK(unescape_bytes(escape_bytes(text, controls::none)) == text);
      }
    }
  }
}

TEST_CASE("what is valid and harmless stays as it is") {
  for (const char* text : {"", "plain", "\xC3\xA4 \xE6\x97\xA5 \xF0\x9F\x98\x80", "C:\\path\\n"}) {
    CHECK(escape_bytes(text, controls::none) == text);
  }
  CHECK(escape_bytes("\xF0\x9F\x98", controls::keep) == "\\xf0\\x9f\\x98");
  CHECK(escape_bytes("\\x41", controls::keep) == "\\x5cx41");
  CHECK(escape_bytes("\x1b\n", controls::keep) == "\x1b\n");
  CHECK(escape_bytes("\x1b\n", controls::lines) == "\\x1b\n");
  CHECK(escape_bytes("\x1b\n", controls::none) == "\\x1b\\x0a");
  CHECK(escape_bytes("\xC2\x9b", controls::none) == "\\xc2\\x9b");
  CHECK(escape_bytes("\xC2\xa0", controls::none) == "\xC2\xa0");
}

TEST_CASE("width counts characters") { CHECK(display_width("a\xC3\xA4\xF0\x9F\x98\x80") == 3); }
