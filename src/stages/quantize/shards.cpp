#include "stages/quantize/shards.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "base/check.h"
#include "format/safetensors.h"
#include "stages/pack/layout.h"

namespace espalier {
namespace {

// Native tensors that an EXL3 matrix takes the place of.
void add_replaced(const MatrixSpec& spec, std::set<std::string>* names) {
  std::string stem = spec.stem;
  if (spec.kind == MatrixKind::kWoA) stem = stem.substr(0, stem.rfind(".slice."));
  names->insert(stem + ".weight");
  names->insert(stem + ".scale");
}

// Marker tensors: present means this codebook; the value is what every reader compares with.
constexpr uint32_t kMarkerMul1 = codec::kMul1Multiplier;
constexpr uint32_t kMarkerMcg = codec::kMcgMultiplier;

void add_parts(const std::string& stem, const codec::Exl3View& matrix, std::vector<NamedView>* out) {
  const codec::TrellisView& t = matrix.trellis;
  out->push_back(
      {stem + ".trellis", {t.words, DType::kI16, {t.k / codec::kTile, t.n / codec::kTile, codec::tile_words(t.k2)}}});
  out->push_back({stem + ".suh", {matrix.suh, DType::kF16, {t.k}}});
  out->push_back({stem + ".svh", {matrix.svh, DType::kF16, {t.n}}});
  if (t.codebook == codec::Codebook::kMul1) out->push_back({stem + ".mul1", {&kMarkerMul1, DType::kI32, {}}});
  if (t.codebook == codec::Codebook::kMcg) out->push_back({stem + ".mcg", {&kMarkerMcg, DType::kI32, {}}});
}

}  // namespace

ShardPlan::ShardPlan(const TensorIndex& index, const Config& config, const std::vector<MatrixSpec>& quantized) {
  std::set<std::string> replaced;
  for (const MatrixSpec& spec : quantized) add_replaced(spec, &replaced);
  std::map<ShardKey, std::vector<std::string>> groups;
  for (int layer = 0; layer < config.n_layers; ++layer) groups[{ShardKey::kLayers, layer}];
  groups[{ShardKey::kHead, 0}];
  for (int stage = 0; stage < config.drafter.n_stages; ++stage) groups[{ShardKey::kDrafter, stage}];
  for (const std::string& name : index.names()) {
    if (replaced.count(name) == 0) groups[shard_key(name)].push_back(name);
  }
  int64_t number = 0;
  for (auto& [key, names] : groups) {
    Shard shard;
    char buffer[64];
    std::snprintf(buffer, sizeof buffer, "model-%05lld-of-%05lld.safetensors", static_cast<long long>(++number),
                  static_cast<long long>(groups.size()));
    shard.name = buffer;
    if (key.group == ShardKey::kLayers) shard.block = key.number;
    if (key.group == ShardKey::kHead) shard.block = kHead;
    if (key.group == ShardKey::kDrafter) shard.block = config.n_layers + key.number;
    shard.native = std::move(names);
    shards_.push_back(std::move(shard));
  }
}

const ShardPlan::Shard& ShardPlan::of_block(int block) const {
  const auto it = std::find_if(shards_.begin(), shards_.end(), [&](const Shard& s) { return s.block == block; });
  CHECK(it != shards_.end()) << "no shard for block " << block;
  return *it;
}

Status write_shard(const std::filesystem::path& dir, const ShardPlan::Shard& shard, const TensorIndex& index,
                   const EncodedTensors& encoded) {
  std::vector<NamedView> tensors;
  for (const std::string& name : shard.native) {
    ASSIGN_OR_RETURN(ConstView view, index.get(name));
    tensors.push_back({name, std::move(view)});
  }
  for (const auto& [stem, matrix] : encoded) add_parts(stem, matrix, &tensors);
  std::sort(tensors.begin(), tensors.end(), [](const NamedView& a, const NamedView& b) {
    const int64_t wide_a = dtype_size_bytes(a.view.dtype);
    const int64_t wide_b = dtype_size_bytes(b.view.dtype);
    return wide_a != wide_b ? wide_a > wide_b : a.name < b.name;
  });
  return write_safetensors(dir / shard.name, tensors, {{"format", "pt"}});
}

}  // namespace espalier
