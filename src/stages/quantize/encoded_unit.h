// What is encoded at once and kept or sent as a whole: one dense matrix, or the three matrices of a routed expert.
//
// Bytes: magic, length of a JSON header, header (recipe, name, records), the tensors of the records in order, and the sha256 of
// all that. Whoever reads them, from a disk or from another host, checks the digest, the recipe and every shape. Internal to the
// stage.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "codec/exl3_tensor.h"
#include "stages/quantize/encode.h"

namespace espalier {

struct EncodedUnit {
  std::vector<MatrixRecord> records;
  std::vector<codec::Exl3Tensor> tensors;  // one per record
};

// Which matrices a unit must hold.
struct UnitShape {
  std::string name;  // stem of a dense matrix, or "layers.3.ffn.experts.7"
  std::vector<MatrixSpec> specs;
  std::vector<int> k2;
  codec::Codebook codebook = codec::Codebook::kMul1;
};

// recipe: identity of the run that the unit belongs to.
std::vector<uint8_t> unit_bytes(const EncodedUnit& unit, std::string_view name, std::string_view recipe);
// Errors: data_loss naming `what`: damaged, of another run, or not the matrices of `shape`. Threads: pure.
Result<EncodedUnit> parse_unit(std::span<const uint8_t> bytes, const UnitShape& shape, std::string_view recipe,
                               std::string_view what);

// A copy of an encoded matrix.
codec::Exl3Tensor copy_exl3(const codec::Exl3View& view);

}  // namespace espalier
