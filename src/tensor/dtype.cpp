#include "tensor/dtype.h"

#include <array>

namespace espalier {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int64_t size_bytes;
};

constexpr std::array<Row, 16> kRows = {{{DType::kBool, "BOOL", 1},
                                        {DType::kU8, "U8", 1},
                                        {DType::kI8, "I8", 1},
                                        {DType::kI16, "I16", 2},
                                        {DType::kU16, "U16", 2},
                                        {DType::kI32, "I32", 4},
                                        {DType::kU32, "U32", 4},
                                        {DType::kI64, "I64", 8},
                                        {DType::kU64, "U64", 8},
                                        {DType::kF8E4M3, "F8_E4M3", 1},
                                        {DType::kF8E5M2, "F8_E5M2", 1},
                                        {DType::kF8E8M0, "F8_E8M0", 1},
                                        {DType::kF16, "F16", 2},
                                        {DType::kBF16, "BF16", 2},
                                        {DType::kF32, "F32", 4},
                                        {DType::kF64, "F64", 8}}};

}  // namespace

int64_t dtype_size_bytes(DType dtype) { return kRows[static_cast<size_t>(dtype)].size_bytes; }
std::string_view dtype_name(DType dtype) { return kRows[static_cast<size_t>(dtype)].name; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace espalier
