// Which rounding points the forward pass applies. Source: golden/model/README.md section 3.
//
// full   fp32 everywhere, no rounding of activations, keys or index data
// kvq    fp32, and window keys / compressed KV / index queries and keys pass through the released cache formats
// vendor bf16 activations, e4m3 activations before FP8 and FP4 linears, the cache formats, bf16 index scores, attention
// by
//        online softmax over 64 list places with bf16 probabilities
#pragma once

#include <optional>
#include <string_view>

namespace espalier {

enum class Numerics { kFull, kKvq, kVendor };

inline std::optional<Numerics> numerics_from_name(std::string_view name) {
  if (name == "full") return Numerics::kFull;
  if (name == "kvq") return Numerics::kKvq;
  if (name == "vendor") return Numerics::kVendor;
  return std::nullopt;
}

inline std::string_view numerics_name(Numerics n) {
  return n == Numerics::kFull ? "full" : n == Numerics::kKvq ? "kvq" : "vendor";
}

}  // namespace espalier
