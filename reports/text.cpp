#include "reports/text.hpp"

#include <fmt/format.h>

namespace kvreplay::reports {
namespace {

unsigned byte_at(std::string_view s, std::size_t i) {
  return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u;
}

// Length of the well-formed character at i (Unicode 15, table 3-7), 0 if there is none.
std::size_t character_length(std::string_view s, std::size_t i) {
  const unsigned a = byte_at(s, i), b = byte_at(s, i + 1);
  if (a < 0x80) return 1;
  unsigned low = 0x80, high = 0xBF;  // range of the second byte
  std::size_t length = 0;
  if (a >= 0xC2 && a <= 0xDF) {
    length = 2;
  } else if (a >= 0xE0 && a <= 0xEF) {
    length = 3;
    if (a == 0xE0) low = 0xA0;   // overlong
    if (a == 0xED) high = 0x9F;  // surrogates
  } else if (a >= 0xF0 && a <= 0xF4) {
    length = 4;
    if (a == 0xF0) low = 0x90;
    if (a == 0xF4) high = 0x8F;  // past U+10FFFF
  } else {
    return 0;
  }
  if (b < low || b > high) return 0;
  for (std::size_t k = 2; k < length; ++k) {
    if (byte_at(s, i + k) < 0x80 || byte_at(s, i + k) > 0xBF) return 0;
  }
  return length;
}

bool is_control(std::string_view s, std::size_t i) {
  const unsigned a = byte_at(s, i);
  return a < 0x20 || a == 0x7F || (a == 0xC2 && byte_at(s, i + 1) < 0xA0);
}

bool stays(std::string_view s, std::size_t i, controls stay) {
  if (s[i] == '\\') return byte_at(s, i + 1) != 'x';
  if (stay == controls::keep || !is_control(s, i)) return true;
  return stay == controls::lines && (s[i] == '\n' || s[i] == '\r' || s[i] == '\t');
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

std::string escape_bytes(std::string_view bytes, controls stay) {
  std::string out;
  for (std::size_t i = 0; i < bytes.size();) {
    const std::size_t length = character_length(bytes, i);
    if (length > 0 && stays(bytes, i, stay)) {
      out.append(bytes, i, length);
      i += length;
      continue;
    }
    for (const std::size_t end = i + (length > 0 ? length : 1); i < end; ++i) {
      out += fmt::format("\\x{:02x}", byte_at(bytes, i));
    }
  }
  return out;
}

std::string unescape_bytes(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    if (text[i] == '\\' && i + 3 < text.size() && text[i + 1] == 'x') {
      const int high = hex_digit(text[i + 2]), low = hex_digit(text[i + 3]);
      if (high >= 0 && low >= 0) {
        out += static_cast<char>(high * 16 + low);
        i += 4;
        continue;
      }
    }
    out += text[i++];
  }
  return out;
}

std::size_t display_width(std::string_view utf8) {
  std::size_t width = 0;
  for (const char c : utf8) width += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return width;
}

}  // namespace kvreplay::reports
