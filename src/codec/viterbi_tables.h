// Codebook values in the units and in the order that the search reads, built once per codebook, width and SIMD tier; internal to the
// codec.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/codebook.h"
#include "base/simd_tier.h"
#include "codec/viterbi_steps.h"

namespace espalier::codec {

// A fixed array that starts on a cache line: vector loads from it never straddle two.
template <typename T>
class AlignedArray {
 public:
  AlignedArray() = default;
  explicit AlignedArray(size_t size) : lines_((size * sizeof(T) + 63) / 64) {}
  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(lines_.data()); }
  size_t capacity() const { return lines_.size() * 64 / sizeof(T); }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  std::vector<Line> lines_;
};

struct CodeTables {
  const StepKernels* kernels = nullptr;
  AlignedArray<int16_t> by_state16;  // fp32 codes have their own table in codebook.h
  // Below: [0] at even positions, [1] at odd ones, which have their own table only at half-integer widths.
  AlignedArray<int16_t> by_node16[2];  // for the trace back: the 2^out_bits states of each out-node side by side
  AlignedArray<int16_t> ordered16[2];  // in the order of the steps
  AlignedArray<float> ordered32[2];
};

// Threads: safe.
const CodeTables& code_tables(Codebook codebook, int k2, SimdTier tier);

// x in units, rounded half up, clamped to +-32767.
int16_t to_cost_units(double x, int unit);

}  // namespace espalier::codec
