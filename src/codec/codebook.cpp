#include "codec/codebook.h"

#include <array>
#include <memory>

#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

// Both halves of the product become fp16 numbers of magnitude [0.125, 2) with random sign; their sum is rounded once.
uint16_t sum_of_halves(uint32_t product) {
  const uint32_t q = (product & 0x8FFF8FFFu) ^ 0x3B603B60u;
  const float low = decode_f16(static_cast<uint16_t>(q));
  const float high = decode_f16(static_cast<uint16_t>(q >> 16));
  return encode_f16(low + high);  // exact in fp32 (11-bit operands, exponents at most 4 apart)
}

uint16_t mul1_value(uint32_t state) {
  const uint32_t p = state * kMul1Multiplier;
  const uint32_t sum = (p & 255u) + ((p >> 8) & 255u) + ((p >> 16) & 255u) + (p >> 24);
  const float slope = decode_f16(0x1EEE);
  const float offset = decode_f16(0xC931);
  // 1024 + sum has 11 bits and the slope 11, so the product is exact in fp32, and so is the sum: one rounding, to fp16.
  const float product = (1024.0f + static_cast<float>(sum)) * slope;
  return encode_f16(product + offset);
}

struct Tables {
  std::array<std::array<uint16_t, kNStates>, 3> f16;
  std::array<std::array<float, kNStates>, 3> f32;
};

const Tables& tables() {
  static const std::unique_ptr<const Tables> instance = [] {
    auto t = std::make_unique<Tables>();
    for (int c = 0; c < 3; ++c) {
      for (int s = 0; s < kNStates; ++s) {
        const uint16_t bits = codebook_value_f16(static_cast<Codebook>(c), static_cast<uint16_t>(s));
        t->f16[c][s] = bits;
        t->f32[c][s] = decode_f16(bits);
      }
    }
    return t;
  }();
  return *instance;
}

}  // namespace

std::string_view codebook_name(Codebook codebook) {
  switch (codebook) {
    case Codebook::k3Inst: return "3inst";
    case Codebook::kMcg: return "mcg";
    case Codebook::kMul1: return "mul1";
  }
  return "unknown";
}

std::optional<Codebook> codebook_from_name(std::string_view name) {
  for (Codebook c : {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1}) {
    if (name == codebook_name(c)) return c;
  }
  return std::nullopt;
}

uint16_t codebook_value_f16(Codebook codebook, uint16_t state) {
  const uint32_t s = state;
  switch (codebook) {
    case Codebook::k3Inst: return sum_of_halves(s * 89226354u + 64248484u);
    case Codebook::kMcg: return sum_of_halves(s * kMcgMultiplier);
    case Codebook::kMul1: return mul1_value(s);
  }
  return 0;
}

const uint16_t* codebook_table_f16(Codebook codebook) { return tables().f16[static_cast<size_t>(codebook)].data(); }
const float* codebook_table_f32(Codebook codebook) { return tables().f32[static_cast<size_t>(codebook)].data(); }

}  // namespace espalier::codec
