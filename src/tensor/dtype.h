// Element types of tensors on disk and in memory, with the names that safetensors uses.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace espalier {

enum class DType : uint8_t { kBool, kU8, kI8, kI16, kU16, kI32, kU32, kI64, kU64, kF8E4M3, kF8E5M2, kF8E8M0, kF16, kBF16, kF32, kF64 };

// Bytes of one element; every type here is a whole number of bytes (MXFP4 is stored as kI8, two values a byte).
int64_t dtype_size_bytes(DType dtype);
// "F8_E4M3", "BF16", …
std::string_view dtype_name(DType dtype);
// "torch.float8_e4m3fn", …: the names in exllamav3's tensor_storage.
std::string_view dtype_torch_name(DType dtype);
// Absent for a name that is not one of ours.
std::optional<DType> dtype_from_name(std::string_view name);

}  // namespace espalier
