#include "model/coverage.h"

#include <algorithm>
#include <unordered_set>

namespace espalier {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

std::string describe(DType dtype, const Shape& shape) {
  return std::string(dtype_name(dtype)) + " " + shape_text(shape);
}

class Checker {
 public:
  Checker(const TensorIndex& index, const Config& config) : index_(index), config_(config) {}

  Status run() {
    for (const TensorSpec& spec : plain_tensors(config_)) RETURN_IF_ERROR(plain(spec));
    for (const MatrixSpec& spec : all_matrices(config_)) RETURN_IF_ERROR(matrix(spec));
    for (const std::string& name : index_.names()) {
      if (used_.count(index_.entry(name)) == 0 && !is_ignored_name(name)) result_.unexpected.push_back(name);
    }
    return ok_status();
  }
  Coverage take() { return std::move(result_); }

 private:
  // Marks the tensor used and checks its shape and type; `dtypes` lists what is accepted, the released one first.
  Status expect(const std::string& name, const std::vector<DType>& dtypes, const Shape& shape,
                bool is_optional = false) {
    const TensorEntry* entry = index_.entry(name);
    if (entry == nullptr) {
      if (is_optional) {
        result_.notes.push_back("'" + name + "' is absent; image tokens cannot be routed");
      } else if (missing_.insert(name).second) {
        result_.missing.push_back(name);
      }
      return ok_status();
    }
    used_.insert(entry);
    if (std::find(dtypes.begin(), dtypes.end(), entry->dtype) == dtypes.end() || entry->shape != shape) {
      return data_loss(index_.file_of(name).string() + ": tensor '" + name + "': expected " +
                       describe(dtypes.front(), shape) + ", found " + describe(entry->dtype, entry->shape) +
                       "; do config.json and the weights belong together?");
    }
    return ok_status();
  }

  Status plain(const TensorSpec& spec) {
    std::vector<DType> dtypes = {spec.dtype};
    const bool is_gate = spec.name.ends_with("ffn.gate.weight");
    if (is_gate || spec.name.ends_with("engram.q_weight") || spec.name.ends_with("engram.k_weight")) {
      dtypes.push_back(DType::kF32);  // packs widen these
      if (is_gate) dtypes.push_back(DType::kF16);
    }
    return expect(spec.name, dtypes, spec.shape, spec.is_optional);
  }

  void note_copy(const std::string& name) {
    const TensorEntry* entry = index_.entry(name);
    if (entry != nullptr && used_.insert(entry).second) {
      result_.notes.push_back("'" + name + "' is ignored: its EXL3 form is used");
    }
  }

  Status wrong(const std::string& name, const std::string& expected) {
    const TensorEntry& entry = *index_.entry(name);
    return data_loss(index_.file_of(name).string() + ": tensor '" + name + "': expected " + expected + ", found " +
                     describe(entry.dtype, entry.shape) + "; do config.json and the weights belong together?");
  }

  // One scale vector of a trellis: 16-bit floats, or the packed signs of old files.
  Status scale_vector(const std::string& name, const std::string& packed, int64_t size) {
    if (index_.contains(name) || !index_.contains(packed)) return expect(name, {DType::kF16}, {size});
    return expect(packed, {DType::kI16}, {size / 16});
  }

  Status exl3(const MatrixSpec& spec, const std::string& stem) {
    const std::string name = stem + ".trellis";
    const TensorEntry& trellis = *index_.entry(name);
    const Shape& s = trellis.shape;
    const bool is_width = s.size() == 3 && s[2] >= 16 && s[2] <= 128 && s[2] % 8 == 0;
    if ((trellis.dtype != DType::kI16 && trellis.dtype != DType::kU16) || !is_width || s[0] * 16 != spec.in ||
        s[1] * 16 != spec.out) {
      return wrong(name, "I16 [" + std::to_string(spec.in / 16) + ", " + std::to_string(spec.out / 16) + ", 16*bits]");
    }
    used_.insert(&trellis);
    RETURN_IF_ERROR(scale_vector(stem + ".suh", stem + ".su", spec.in));
    RETURN_IF_ERROR(scale_vector(stem + ".svh", stem + ".sv", spec.out));
    for (const char* marker : {".mul1", ".mcg"}) {
      const TensorEntry* entry = index_.entry(stem + marker);
      if (entry == nullptr) continue;
      if (entry->dtype != DType::kI32 || n_elements(entry->shape) != 1 || entry->shape.size() > 1) {
        return wrong(stem + marker, "one I32");
      }
      used_.insert(entry);
    }
    if (index_.contains(stem + ".mul1") && index_.contains(stem + ".mcg")) {
      return data_loss(index_.file_of(name).string() + ": tensor '" + stem +
                       ".mul1': expected at most one codebook marker, found mcg beside it; the file is damaged");
    }
    note_copy(native_name(spec));
    const std::string native = native_name(spec);
    note_copy(native.substr(0, native.size() - 7) + ".scale");
    return ok_status();
  }

  Status matrix(const MatrixSpec& spec) {
    const std::string stem = exl3_stem(index_, spec);
    if (!stem.empty()) return exl3(spec, stem);
    const std::string name = native_name(spec);
    const std::string scale = name.substr(0, name.size() - 7) + ".scale";
    const int64_t rows = spec.kind == MatrixKind::kWoA ? spec.out * config_.o_groups : spec.out;
    switch (spec.native) {
      case NativeForm::kFp8:
        RETURN_IF_ERROR(expect(name, {DType::kF8E4M3}, {rows, spec.in}));
        return expect(scale, {DType::kF8E8M0},
                      {ceil_div(rows, config_.fp8_block_rows), ceil_div(spec.in, config_.fp8_block_cols)});
      case NativeForm::kMxfp4:
        RETURN_IF_ERROR(expect(name, {DType::kI8}, {rows, spec.in / 2}));
        return expect(scale, {DType::kF8E8M0}, {rows, spec.in / 32});
      case NativeForm::kBf16:
        return expect(name, {DType::kBF16}, {rows, spec.in});
      case NativeForm::kF32:
        return expect(name, {DType::kF32}, {rows, spec.in});
    }
    return ok_status();
  }

  const TensorIndex& index_;
  const Config& config_;
  Coverage result_;
  std::unordered_set<const TensorEntry*> used_;
  std::unordered_set<std::string> missing_;
};

std::string first_names(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < 3; ++i) out += (i > 0 ? ", '" : "'") + names[i] + "'";
  return names.size() > 3 ? out + ", …" : out;
}

}  // namespace

std::string native_name(const MatrixSpec& spec) {
  return module_stem(spec) + ".weight";
}

std::string exl3_stem(const TensorIndex& index, const MatrixSpec& spec) {
  if (index.contains(spec.stem + ".trellis")) return spec.stem;
  if (spec.kind == MatrixKind::kHead && index.contains("lm_head.trellis")) return "lm_head";
  if (spec.kind == MatrixKind::kWoA) {
    const std::string base = spec.stem.substr(0, spec.stem.find(".slice."));
    const std::string group = std::to_string(spec.group);
    for (const std::string& stem : {base + "." + group, base + ".group." + group}) {
      if (index.contains(stem + ".trellis")) return stem;
    }
  }
  return "";
}

Result<Coverage> check_coverage(const TensorIndex& index, const Config& config) {
  Checker checker(index, config);
  RETURN_IF_ERROR(checker.run());
  return checker.take();
}

Result<Coverage> require_coverage(const TensorIndex& index, const Config& config) {
  ASSIGN_OR_RETURN(Coverage coverage, check_coverage(index, config));
  const std::string dir = index.dir().string();
  if (!coverage.missing.empty()) {
    return not_found(dir + ": expected " + std::to_string(coverage.missing.size()) + " more tensor(s), first " +
                     first_names(coverage.missing) +
                     ", found none of them; is a shard missing (Engram shards may live in --engram DIR)?");
  }
  if (!coverage.unexpected.empty()) {
    return data_loss(dir + ": found " + std::to_string(coverage.unexpected.size()) +
                     " tensor(s) that the config does not explain, first " + first_names(coverage.unexpected) +
                     "; expected none; do config.json and the weights belong together?");
  }
  return coverage;
}

}  // namespace espalier
