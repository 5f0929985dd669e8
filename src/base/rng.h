// Counter-based random numbers: value i of stream `key` is a pure function of (key, i), so results do not depend on the order
// or the place of evaluation. Keys are made from a seed and a name (a tensor's name, a request id).
// Source: splitmix64 (Steele, Lea, Flood 2014), used as a counter generator; FNV-1a for names.
#pragma once

#include <cstdint>
#include <string_view>

namespace espalier {

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

class CounterRng {
 public:
  CounterRng(uint64_t seed, std::string_view name) {
    uint64_t h = 0xCBF29CE484222325ull;
    for (char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
    key_ = mix64(mix64(seed + 0x9E3779B97F4A7C15ull) ^ h);
  }

  // 64 uniform bits at position i.
  uint64_t bits(uint64_t i) const { return mix64(key_ + (i + 1) * 0x9E3779B97F4A7C15ull); }
  // Uniform in [0, 1) with 53 bits.
  double uniform(uint64_t i) const { return static_cast<double>(bits(i) >> 11) * 0x1.0p-53; }
  // +1 or -1.
  float sign(uint64_t i) const { return (bits(i) >> 63) != 0 ? -1.0f : 1.0f; }

 private:
  uint64_t key_;
};

}  // namespace espalier
