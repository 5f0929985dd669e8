#include "text/byte_alphabet.h"

#include "text/utf8.h"

namespace espalier {
namespace {

constexpr uint32_t kAlphabetEnd = 0x144;  // one past the last stand-in

std::array<uint32_t, 256> make_alphabet() {
  std::array<uint32_t, 256> out{};
  uint32_t next = 0x100;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
    out[b] = printable ? b : next++;
  }
  return out;
}

std::array<int16_t, kAlphabetEnd> make_inverse() {
  std::array<int16_t, kAlphabetEnd> out;
  out.fill(-1);
  for (int b = 0; b < 256; ++b) out[byte_alphabet()[b]] = static_cast<int16_t>(b);
  return out;
}

}  // namespace

const std::array<uint32_t, 256>& byte_alphabet() {
  static const std::array<uint32_t, 256> alphabet = make_alphabet();
  return alphabet;
}

std::optional<std::string> bytes_of_token(std::string_view token) {
  static const std::array<int16_t, kAlphabetEnd> inverse = make_inverse();
  std::string out;
  for (size_t at = 0; at < token.size();) {
    const Utf8Unit unit = next_utf8(token, at);
    if (!unit.valid || unit.code_point >= kAlphabetEnd || inverse[unit.code_point] < 0) return std::nullopt;
    out += static_cast<char>(inverse[unit.code_point]);
    at += unit.size;
  }
  return out;
}

std::string token_of_bytes(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(byte_alphabet()[static_cast<uint8_t>(c)], out);
  return out;
}

}  // namespace espalier
