// GPT-2's byte alphabet: every byte has a printable character, so that a vocabulary of byte strings is valid JSON.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace espalier {

// Code point that stands for each byte: printable Latin-1 for itself, the other 68 bytes from U+0100 on.
const std::array<uint32_t, 256>& byte_alphabet();

// The bytes that a vocabulary string stands for; nullopt when a character is not of the alphabet. `token` is valid
// UTF-8.
std::optional<std::string> bytes_of_token(std::string_view token);

// The vocabulary string of some bytes.
std::string token_of_bytes(std::string_view bytes);

}  // namespace espalier
