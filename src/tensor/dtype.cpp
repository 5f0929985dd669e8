#include "tensor/dtype.h"

#include <array>

namespace espalier {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  std::string_view torch_name;
  int64_t size_bytes;
};

constexpr std::array<Row, 16> kRows = {{{DType::kBool, "BOOL", "torch.bool", 1},
                                        {DType::kU8, "U8", "torch.uint8", 1},
                                        {DType::kI8, "I8", "torch.int8", 1},
                                        {DType::kI16, "I16", "torch.int16", 2},
                                        {DType::kU16, "U16", "torch.uint16", 2},
                                        {DType::kI32, "I32", "torch.int32", 4},
                                        {DType::kU32, "U32", "torch.uint32", 4},
                                        {DType::kI64, "I64", "torch.int64", 8},
                                        {DType::kU64, "U64", "torch.uint64", 8},
                                        {DType::kF8E4M3, "F8_E4M3", "torch.float8_e4m3fn", 1},
                                        {DType::kF8E5M2, "F8_E5M2", "torch.float8_e5m2", 1},
                                        {DType::kF8E8M0, "F8_E8M0", "torch.uint8", 1},
                                        {DType::kF16, "F16", "torch.float16", 2},
                                        {DType::kBF16, "BF16", "torch.bfloat16", 2},
                                        {DType::kF32, "F32", "torch.float32", 4},
                                        {DType::kF64, "F64", "torch.float64", 8}}};

}  // namespace

int64_t dtype_size_bytes(DType dtype) { return kRows[static_cast<size_t>(dtype)].size_bytes; }
std::string_view dtype_name(DType dtype) { return kRows[static_cast<size_t>(dtype)].name; }

std::string_view dtype_torch_name(DType dtype) { return kRows[static_cast<size_t>(dtype)].torch_name; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace espalier
