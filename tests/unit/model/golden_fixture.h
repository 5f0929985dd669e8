// The tiny golden checkpoint and the recorded outputs of the vendor's code (tests/golden/model/README.md), for the
// tests here.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "format/safetensors.h"
#include "model/forward.h"
#include "tensor/float_formats.h"

namespace espalier {

inline const std::vector<std::string>& prompt_names() {
  static const std::vector<std::string> names = {"p1", "p5", "p17", "p40", "p150"};
  return names;
}

inline ThreadPool& test_pool() {
  static ThreadPool pool(2);
  return pool;
}

inline std::string golden_dir() {
  return ESPALIER_GOLDEN_DIR "/model";
}

// A recorded file. Values are widened: floats to float, integers to int64.
class Recorded {
 public:
  explicit Recorded(const std::string& path) {
    auto file = SafetensorsFile::open(path);
    CHECK(file.ok()) << file.error().message();
    file_ = std::make_unique<SafetensorsFile>(std::move(*file));
  }
  bool has(const std::string& name) const { return file_->find(name) != nullptr; }
  ConstView view(const std::string& name) const {
    auto v = file_->get(name);
    CHECK(v.ok()) << v.error().message();
    return *v;
  }
  Shape shape(const std::string& name) const { return view(name).shape; }
  std::vector<float> floats(const std::string& name) const {
    const ConstView v = view(name);
    std::vector<float> out(static_cast<size_t>(v.size()));
    for (size_t i = 0; i < out.size(); ++i) {
      const uint8_t* p = static_cast<const uint8_t*>(v.data) + i * static_cast<size_t>(dtype_size_bytes(v.dtype));
      uint16_t half;
      if (v.dtype == DType::kF32) {
        std::memcpy(&out[i], p, 4);
      } else {
        CHECK(v.dtype == DType::kBF16) << name;
        std::memcpy(&half, p, 2);
        out[i] = decode_bf16(half);
      }
    }
    return out;
  }
  std::vector<int64_t> integers(const std::string& name) const {
    const ConstView v = view(name);
    std::vector<int64_t> out(static_cast<size_t>(v.size()));
    for (size_t i = 0; i < out.size(); ++i) {
      const uint8_t* p = static_cast<const uint8_t*>(v.data) + i * static_cast<size_t>(dtype_size_bytes(v.dtype));
      int32_t narrow;
      switch (v.dtype) {
        case DType::kI64:
          std::memcpy(&out[i], p, 8);
          break;
        case DType::kI32:
          std::memcpy(&narrow, p, 4);
          out[i] = narrow;
          break;
        default:
          CHECK(v.dtype == DType::kU8) << name;
          out[i] = *p;
      }
    }
    return out;
  }
  std::vector<int32_t> ids(const std::string& name) const {
    const std::vector<int64_t> wide = integers(name);
    return {wide.begin(), wide.end()};
  }

 private:
  std::unique_ptr<SafetensorsFile> file_;
};

inline const Recorded& common() {
  static const Recorded r(golden_dir() + "/tiny-a-ref/common.safetensors");
  return r;
}
inline const Recorded& fp32() {
  static const Recorded r(golden_dir() + "/tiny-a-ref/reference-fp32.safetensors");
  return r;
}
inline const Recorded& fp32kvq() {
  static const Recorded r(golden_dir() + "/tiny-a-ref/reference-fp32kvq.safetensors");
  return r;
}
// The vendor reference is too large to travel with the tree: null when the shared golden folder is absent.
inline const Recorded* vendor() {
  static const std::unique_ptr<Recorded> r = [] {
    const char* from_env = std::getenv("ESPALIER_SHARED_GOLDEN");
    const std::string dir = from_env != nullptr ? from_env : ESPALIER_SHARED_GOLDEN;
    const std::string path = dir + "/model/tiny-a-ref/reference-vendor.safetensors";
    return std::filesystem::exists(path) ? std::make_unique<Recorded>(path) : nullptr;
  }();
  return r.get();
}

inline std::shared_ptr<const Model> tiny_model() {
  static const std::shared_ptr<const Model> model = [] {
    auto m = Model::load(golden_dir() + "/tiny-a", {}, test_pool());
    CHECK(m.ok()) << m.error().message();
    return *m;
  }();
  return model;
}

inline std::vector<int32_t> prompt(const std::string& name) {
  return common().ids(name + ".tokens");
}

inline ForwardResult must_forward(SequenceState& state, std::span<const int32_t> ids, const ForwardOptions& options) {
  auto r = forward(*tiny_model(), state, ids, options, test_pool());
  CHECK(r.ok()) << r.error().message();
  return std::move(*r);
}

// Logits of every position of one prompt, in calls of `chunk` tokens.
inline Tensor all_logits(const std::vector<int32_t>& ids, Numerics numerics, int64_t chunk,
                         LayerObserver* observer = nullptr) {
  SequenceState state(tiny_model()->config());
  ForwardOptions o;
  o.numerics = numerics;
  o.all_logits = true;
  o.chunk = chunk;
  o.observer = observer;
  return must_forward(state, ids, o).logits;
}

struct Difference {
  float worst = 0;
  size_t at = 0;
  float found = 0, expected = 0;
};
inline Difference difference(const float* found, const std::vector<float>& expected) {
  Difference d;
  for (size_t i = 0; i < expected.size(); ++i) {
    const float e = std::fabs(found[i] - expected[i]);
    if (!(e <= d.worst)) d = {e, i, found[i], expected[i]};
  }
  return d;
}
inline std::ostream& operator<<(std::ostream& out, const Difference& d) {
  return out << "worst " << d.worst << " at " << d.at << ": found " << d.found << ", expected " << d.expected;
}

}  // namespace espalier
