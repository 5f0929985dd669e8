// How EXL3 matrices of the mul1 codebook are multiplied; all other matrices are always multiplied in fp32.
//
// exact  fp32 with the codebook's fp16 values
// int8   integer sums with 8-bit activations (about 0.6 % error per product), the fastest
// int8r  the same with a residual, 15 to 16 bits (about 0.02 %)
// Source: docs/formats/exl3.md, "Integer products".
#pragma once

#include <optional>
#include <string_view>

namespace espalier {

enum class Products { kExact, kInt8, kInt8Residual };

inline std::optional<Products> products_from_name(std::string_view name) {
  if (name == "exact") return Products::kExact;
  if (name == "int8") return Products::kInt8;
  if (name == "int8r") return Products::kInt8Residual;
  return std::nullopt;
}

inline std::string_view products_name(Products p) {
  return p == Products::kExact ? "exact" : p == Products::kInt8 ? "int8" : "int8r";
}

}  // namespace espalier
