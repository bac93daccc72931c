#include "tracer/tokens.hpp"

#include <doctest/doctest.h>

#include "tracer/test_support.hpp"

namespace kvreplay::tracer {
namespace {

std::string error_for(const std::string& text) {
  const scratch_folder folder;
  write_file(folder.file("ids.tokens"), text);
  const std::string message = message_of([&] { read_token_file(folder.file("ids.tokens")); });
  CHECK(mentions(message, "ids.tokens"));
  return message;
}

TEST_CASE("token files are decimal ids between white space") {
  const scratch_folder folder;
  write_file(folder.file("ids"), " 1 2\t3\r\n\n0004\n2147483647");
  CHECK(read_token_file(folder.file("ids")) == std::vector<std::int32_t>{1, 2, 3, 4, 2147483647});
}

TEST_CASE("what is no token id is named") {
  CHECK(mentions(error_for("1 2 three 4"), "word 2: 'three' is not a number"));
  CHECK(mentions(error_for("1 -2"), "word 1: '-2' is negative"));
  CHECK(mentions(error_for("2147483648"), "does not fit"));
  CHECK(mentions(error_for("1,2"), "'1,2' is not a number"));
  CHECK(mentions(error_for("+1"), "not a number"));
  CHECK(mentions(error_for("1.0"), "not a number"));
  CHECK(mentions(error_for(std::string("1 \x01\x00", 4)), "'\\x01\\x00'"));
  CHECK(mentions(error_for(""), "no token ids"));
  CHECK(mentions(error_for(" \n\t"), "no token ids"));
  CHECK(mentions(message_of([] { read_token_file("no/such/file"); }), "no/such/file"));
}

}  // namespace
}  // namespace kvreplay::tracer
