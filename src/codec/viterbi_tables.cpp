#include "codec/viterbi_tables.h"

#include <array>
#include <cmath>
#include <memory>
#include <mutex>

#include "codec/viterbi_cost.h"

namespace espalier::codec {
namespace {

const StepKernels& kernels_of(SimdTier tier) {
  switch (tier) {
#if defined(__x86_64__)
    case SimdTier::kAvx512: return step_kernels_avx512();
    case SimdTier::kAvx2: return step_kernels_avx2();
#endif
    case SimdTier::kReference: return step_kernels_reference();
    default: return step_kernels_baseline();
  }
}

std::unique_ptr<CodeTables> make_code_tables(Codebook codebook, int k2, const StepKernels& kernels) {
  auto tables = std::make_unique<CodeTables>();
  tables->kernels = &kernels;
  const float* values = codebook_table_f32(codebook);
  const int unit = cost_unit(k2, codebook);
  tables->by_state16 = AlignedArray<int16_t>(kNStates);
  int16_t* by_state16 = tables->by_state16.data();
  for (int s = 0; s < kNStates; ++s) by_state16[s] = to_cost_units(values[s], unit);
  for (int parity = 0; parity <= k2 % 2; ++parity) {
    const int out_bits = step_bits(k2, parity + 1);
    tables->by_node16[parity] = AlignedArray<int16_t>(kNStates);
    tables->ordered16[parity] = AlignedArray<int16_t>(kNStates);
    tables->ordered32[parity] = AlignedArray<float>(kNStates);
    int16_t* by_node16 = tables->by_node16[parity].data();
    int16_t* ordered16 = tables->ordered16[parity].data();
    float* ordered32 = tables->ordered32[parity].data();
    for (int s = 0; s < kNStates; ++s) {
      by_node16[((s << out_bits) | (s >> (16 - out_bits))) & 0xFFFF] = by_state16[s];
      ordered16[table_index(s, k2, parity, kernels.lanes16)] = by_state16[s];
      ordered32[table_index(s, k2, parity, kernels.lanes32)] = values[s];
    }
  }
  return tables;
}

}  // namespace

const CodeTables& code_tables(Codebook codebook, int k2, SimdTier tier) {
  struct Slot {
    std::once_flag once;
    std::unique_ptr<CodeTables> tables;
  };
  static std::array<Slot, 4 * 3 * (kMaxK2 + 1)> slots;
  Slot& slot = slots[(static_cast<size_t>(tier) * 3 + static_cast<size_t>(codebook)) * (kMaxK2 + 1) + static_cast<size_t>(k2)];
  std::call_once(slot.once, [&] { slot.tables = make_code_tables(codebook, k2, kernels_of(tier)); });
  return *slot.tables;
}

int16_t to_cost_units(double x, int unit) {
  const double scaled = std::floor(x * unit + 0.5);
  return static_cast<int16_t>(scaled < -32767 ? -32767 : scaled > 32767 ? 32767 : scaled);
}

}  // namespace espalier::codec
