// The three EXL3 codebooks: a 16-bit trellis state -> one fp16 number, by 32-bit integer arithmetic and a single rounding.
//
// Which codebook a tensor uses is told by its marker tensor (`.mul1`, `.mcg`, or none for 3inst), never stored elsewhere.
// Tables are built once on first use from the formulas and shared by all threads.
// Source: docs/formats/exl3.md, "Codebooks"; QTIP (arXiv 2406.11235), computed codes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace espalier::codec {

enum class Codebook : uint8_t { k3Inst, kMcg, kMul1 };

inline constexpr int kNStates = 65536;
inline constexpr uint32_t kMcgMultiplier = 0xCBAC1FEDu;
inline constexpr uint32_t kMul1Multiplier = 0x83DCD12Du;

// "3inst", "mcg", "mul1".
std::string_view codebook_name(Codebook codebook);
// Absent for any other text.
std::optional<Codebook> codebook_from_name(std::string_view name);

// fp16 bits of one state, straight from the formula.
uint16_t codebook_value_f16(Codebook codebook, uint16_t state);

// All 65536 values, indexed by state: as fp16 bits, and as floats (exactly the same numbers).
// Threads: safe; built once.
const uint16_t* codebook_table_f16(Codebook codebook);
const float* codebook_table_f32(Codebook codebook);

}  // namespace espalier::codec
