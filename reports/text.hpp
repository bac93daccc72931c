// Texts in reports: names and token pieces are bytes from files of others and need not be UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvreplay::reports {

// Which control characters (U+0000..001F, U+007F..009F) stay as they are.
enum class controls {
  keep,   // all: for JSON, which escapes them itself
  lines,  // tab, line feed, carriage return: for CSV
  none,   // for a terminal: a name can neither move the cursor nor break a row
};

// Valid UTF-8 from any bytes, losslessly: a byte that is not part of a well-formed UTF-8 character,
// and each byte of a control character that may not stay, becomes \xNN (two lower-case hex digits);
// a backslash in front of an x becomes \x5c. Everything else stays. Never throws but for memory.
std::string escape_bytes(std::string_view bytes, controls stay);

// The inverse. A \x without two lower-case hex digits after it stays as it is.
std::string unescape_bytes(std::string_view text);

// Number of code points of valid UTF-8: columns on a terminal, near enough for names.
std::size_t display_width(std::string_view utf8);

}  // namespace kvreplay::reports
