// Golden EXL3 data made by the real exllamav3 (tests/golden/exl3/README.md): lookup of cases and of what the README's table
// records about them. The larger files are not part of the tree; tests that need them say so when they are absent.
// Used by tests and by bench programs, which define the two folders.
#pragma once

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "codec/exl3_tensor.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "tensor/float_formats.h"

namespace espalier::codec::golden {

inline std::filesystem::path tree_file(const std::string& name) {
  return std::filesystem::path(ESPALIER_GOLDEN_DIR) / "exl3" / name;
}
inline std::filesystem::path shared_file(const std::string& name) {
  return std::filesystem::path(ESPALIER_SHARED_GOLDEN) / "exl3" / name;
}

inline SafetensorsFile open(const std::filesystem::path& path) {
  Result<SafetensorsFile> file = SafetensorsFile::open(path);
  CHECK(file.ok()) << file.error().message();
  return std::move(file).value();
}

// Any 16- or 32-bit tensor as plain numbers; copies, so alignment does not matter.
template <typename T>
std::vector<T> values(const SafetensorsFile& file, const std::string& name) {
  Result<ConstView> view = file.get(name);
  CHECK(view.ok()) << view.error().message();
  CHECK(sizeof(T) == static_cast<size_t>(dtype_size_bytes(view->dtype))) << name;
  std::vector<T> out(static_cast<size_t>(view->size()));
  std::memcpy(out.data(), view->data, out.size() * sizeof(T));
  return out;
}

inline std::vector<float> floats(const SafetensorsFile& file, const std::string& name) {
  Result<ConstView> view = file.get(name);
  CHECK(view.ok()) << view.error().message();
  if (view->dtype == DType::kF32) return values<float>(file, name);
  CHECK(view->dtype == DType::kF16) << name;
  std::vector<float> out;
  for (uint16_t bits : values<uint16_t>(file, name)) out.push_back(decode_f16(bits));
  return out;
}

inline TensorLookup lookup(const SafetensorsFile& file) {
  return [&file](const std::string& name) -> std::optional<ConstView> {
    const TensorEntry* entry = file.find(name);
    if (entry == nullptr) return std::nullopt;
    return file.view(*entry);
  };
}

inline Exl3Tensor load(const SafetensorsFile& file, const std::string& name) {
  Result<Exl3Tensor> tensor = load_exl3(name, find_exl3_parts(lookup(file), name));
  CHECK(tensor.ok()) << tensor.error().message();
  return std::move(tensor).value();
}

// Names of all linears of the file, experts included.
inline std::vector<std::string> linears(const SafetensorsFile& file) {
  std::vector<std::string> names;
  for (const TensorEntry& entry : file.entries()) {
    const std::string suffix = ".trellis";
    if (entry.name.size() > suffix.size() && entry.name.ends_with(suffix)) {
      names.push_back(entry.name.substr(0, entry.name.size() - suffix.size()));
    }
  }
  return names;
}

// A linear case with its original weight and a Hessian.
struct Case {
  std::string name;
  int64_t k = 0, n = 0;
  int k2 = 0;
  Codebook codebook = Codebook::kMul1;
  std::vector<float> weight;     // [k, n]
  std::vector<double> hessian;   // [k, k]; empty: none was used
  std::vector<float> decoded;    // upstream's result
};

// X^T X / rows.
inline std::vector<double> hessian_of(const std::vector<float>& x, int64_t k) {
  const int64_t rows = static_cast<int64_t>(x.size()) / k;
  std::vector<double> h(static_cast<size_t>(k * k));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) h[static_cast<size_t>(i * k + j)] += double{x[r * k + i]} * double{x[r * k + j]};
    }
  }
  for (double& v : h) v /= static_cast<double>(rows);
  return h;
}

// All cases of one file whose weight is known (mul1_256x384_k3 shares its weight and Hessian with _k2).
inline std::vector<Case> cases(const SafetensorsFile& file) {
  std::vector<Case> out;
  for (const std::string& name : linears(file)) {
    const std::string source = name == "mul1_256x384_k3" ? "mul1_256x384_k2" : name;
    if (file.find(source + ".weight") == nullptr) continue;
    const Exl3Tensor tensor = load(file, name);
    Case c;
    c.name = name;
    c.k = tensor.k;
    c.n = tensor.n;
    c.k2 = tensor.k2;
    c.codebook = tensor.codebook;
    c.weight = floats(file, source + ".weight");
    c.decoded = floats(file, name + ".dec");
    if (file.find(source + ".H") != nullptr) {
      const std::vector<float> h = floats(file, source + ".H");
      c.hessian.assign(h.begin(), h.end());
    } else if (file.find(source + ".calib_x") != nullptr) {
      c.hessian = hessian_of(floats(file, source + ".calib_x"), c.k);
    }
    out.push_back(std::move(c));
  }
  return out;
}

}  // namespace espalier::codec::golden
