#include "stages/pack/layout.h"

#include <gmock/gmock.h>

#include <map>

#include "model/config.h"
#include "model/names.h"
#include "unit/stages/tiny_model.h"

namespace espalier {
namespace {

using Declaration = SafetensorsWriter::Declaration;

// Every quantizable matrix as an EXL3 group, everything else native: the tensors of a pack of the tiny checkpoint.
std::vector<Declaration> pack_tensors(const Config& config) {
  std::vector<Declaration> out;
  for (const MatrixSpec& m : all_matrices(config)) {
    if (!m.is_quantizable) {
      out.push_back({m.stem + ".weight", DType::kBF16, {m.out, m.in}});
      continue;
    }
    out.push_back({m.stem + ".trellis", DType::kI16, {m.in / 16, m.out / 16, 48}});
    out.push_back({m.stem + ".suh", DType::kF16, {m.in}});
    out.push_back({m.stem + ".svh", DType::kF16, {m.out}});
    out.push_back({m.stem + ".mul1", DType::kI32, {}});
  }
  for (const TensorSpec& t : plain_tensors(config)) out.push_back({t.name, t.dtype, t.shape});
  out.push_back({"vision.patch_embed.proj.weight", DType::kBF16, {4, 4}});
  return out;
}

std::map<std::string, std::string> files_of(Layout layout, const std::vector<Declaration>& tensors, const Config& config) {
  std::map<std::string, std::string> out;
  for (const PackFile& file : group_tensors(layout, tensors, config.n_experts)) {
    EXPECT_FALSE(file.tensors.empty()) << file.name;
    for (const size_t i : file.tensors) EXPECT_TRUE(out.emplace(tensors[i].name, file.name).second) << tensors[i].name;
  }
  EXPECT_EQ(out.size(), tensors.size());
  return out;
}

TEST(Layout, vllm_halves_the_experts_of_a_layer_and_counts_the_tables_apart) {
  const Config c = load_config(test::tiny_dir()).value();
  auto file = files_of(Layout::kVllm, pack_tensors(c), c);
  const std::string e = ".w1.trellis";
  EXPECT_EQ(file["layers.0.ffn.experts.0" + e], "model-exl3-L00-p0.safetensors");
  EXPECT_EQ(file["layers.0.ffn.experts." + std::to_string(c.n_experts / 2 - 1) + ".w2.suh"], "model-exl3-L00-p0.safetensors");
  EXPECT_EQ(file["layers.0.ffn.experts." + std::to_string(c.n_experts / 2) + e], "model-exl3-L00-p1.safetensors");
  EXPECT_EQ(file["layers.1.attn.wo_a.slice.1.svh"], "model-exl3-dense-L01.safetensors");
  EXPECT_EQ(file["head.trellis"], "model-exl3-head.safetensors");
  EXPECT_EQ(file["mtp.0.main_proj.mul1"], "model-exl3-mtp.safetensors");
  EXPECT_EQ(file["mtp.0.ffn.experts.0" + e], "model-exl3-mtp-experts.safetensors");
  // rest, embedding, layers, head and norm, stages; then one file per Engram layer
  const int shards = 3 + c.n_layers + c.drafter.n_stages;
  char rest[64], table[64];
  std::snprintf(rest, sizeof rest, "model-00001-of-%05d.safetensors", shards);
  std::snprintf(table, sizeof table, "model-%05d-of-%05d.safetensors", shards + 1, shards + static_cast<int>(c.engram.layers.size()));
  EXPECT_EQ(file["vision.patch_embed.proj.weight"], rest);
  const std::string engram = "layers." + std::to_string(c.engram.layers[0]) + ".engram.";
  EXPECT_EQ(file[engram + "embed.weight"], table);
  EXPECT_EQ(file[engram + "q_weight"], table);  // as in the release, whose shard can then be linked
}

TEST(Layout, tensorfold_puts_exl3_by_layer_and_everything_native_together) {
  const Config c = load_config(test::tiny_dir()).value();
  auto file = files_of(Layout::kTensorfold, pack_tensors(c), c);
  EXPECT_EQ(file["layers.2.ffn.experts.0.w3.trellis"], "layer-02.safetensors");
  EXPECT_EQ(file["layers.2.attn.wq_b.suh"], "layer-02.safetensors");
  EXPECT_EQ(file["layers.2.ffn.gate.bias_vl"], "native.safetensors");
  EXPECT_EQ(file["head.svh"], "head-mtp.safetensors");
  EXPECT_EQ(file["mtp.0.attn.wkv.trellis"], "head-mtp.safetensors");
  EXPECT_EQ(file["embed.weight"], "native.safetensors");
  EXPECT_EQ(file["layers." + std::to_string(c.engram.layers[0]) + ".engram.embed.scale"],
            "engram-0" + std::to_string(c.engram.layers[0]) + ".safetensors");
}

TEST(Layout, storage_puts_wide_types_first_so_that_everything_is_aligned) {
  const Config c = load_config(test::tiny_dir()).value();
  const std::vector<Declaration> tensors = pack_tensors(c);
  for (const Layout layout : {Layout::kExllamav3, Layout::kVllm, Layout::kTensorfold}) {
    for (const PackFile& file : group_tensors(layout, tensors, c.n_experts)) {
      int64_t at = 0;
      for (const size_t i : file.tensors) {
        EXPECT_EQ(at % dtype_size_bytes(tensors[i].dtype), 0) << tensors[i].name;
        at += n_elements(tensors[i].shape) * dtype_size_bytes(tensors[i].dtype);
      }
    }
  }
}

TEST(Layout, other_spellings_have_one_canonical_name) {
  EXPECT_EQ(canonical_name("lm_head.trellis"), "head.trellis");
  EXPECT_EQ(canonical_name("layers.3.attn.wo_a.5.suh"), "layers.3.attn.wo_a.slice.5.suh");
  EXPECT_EQ(canonical_name("layers.3.attn.wo_a.group.5.suh"), "layers.3.attn.wo_a.slice.5.suh");
  for (const char* name : {"layers.3.attn.wo_a.slice.5.suh", "layers.3.attn.wo_a.weight", "head.weight", "layers.0.attn.wo_b.suh"}) {
    EXPECT_EQ(canonical_name(name), name);
  }
}

}  // namespace
}  // namespace espalier
