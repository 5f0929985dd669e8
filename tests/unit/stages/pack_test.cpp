#include "stages/pack/pack.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/hash.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "unit/stages/test_files.h"

namespace espalier {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Writes an EXL3 group of zeros and one native tensor.
void write_shard(const std::filesystem::path& path, const std::string& stem, int64_t k, int64_t n, int64_t bits) {
  const Tensor trellis(DType::kI16, {k / 16, n / 16, 16 * bits});
  const Tensor suh(DType::kF16, {k});
  const Tensor svh(DType::kF16, {n});
  const Tensor mul1(DType::kI32, {});
  const Tensor norm(DType::kBF16, {k});
  ASSERT_TRUE(write_safetensors(path, {{stem + ".trellis", trellis.view()},
                                       {stem + ".suh", suh.view()},
                                       {stem + ".svh", svh.view()},
                                       {stem + ".mul1", mul1.view()},
                                       {stem + "_norm.weight", norm.view()}})
                  .ok());
}

TEST(Pack, bits_per_weight_counts_trellis_bits_of_the_layers_only) {
  const test::TempFolder dir;
  write_shard(dir / "model-00001-of-00003.safetensors", "layers.0.attn.wq_a", 256, 128, 2);
  write_shard(dir / "model-00002-of-00003.safetensors", "layers.1.attn.wq_a", 256, 384, 4);
  write_shard(dir / "model-00003-of-00003.safetensors", "head", 256, 512, 8);
  const Result<PackSummary> s = summarise_shards(dir.path());
  ASSERT_TRUE(s.ok()) << s.error().message();
  EXPECT_DOUBLE_EQ(s->bpw, (2.0 * 128 + 4.0 * 384) / (128 + 384));
  EXPECT_EQ(s->matrices, 3);
  EXPECT_EQ(s->tensors, 15);
}

TEST(Pack, the_description_lists_every_tensor_with_its_shard_width_and_codebook) {
  const test::TempFolder dir;
  std::filesystem::create_directories(dir / "pack");
  write_shard(dir / "pack/model-00001-of-00001.safetensors", "layers.0.attn.wq_a", 256, 128, 3);
  test::write_file(dir / "source/config.json",
                   R"({"model_type":"deepseek_v41","quantization_config":{"quant_method":"fp8"}})");
  PackFacts facts;
  facts.producer = "espalier test";
  facts.calibration_rows = 7;
  facts.calibration_cols = 99;
  ASSERT_TRUE(write_pack_description(dir / "pack", dir / "source", Layout::kExllamav3, facts).ok());

  const Json config = read_json_file(dir / "pack/config.json").value();
  EXPECT_EQ(config["model_type"], "deepseek_v41");
  EXPECT_EQ(config["quantization_config"]["quant_method"], "exl3");
  EXPECT_EQ(config["quantization_config"]["bits"], 3.0);
  EXPECT_EQ(config["quantization_config"]["head_bits"], 16);  // native
  EXPECT_EQ(config["quantization_config"]["codebook"], "mul1");
  EXPECT_EQ(config["quantization_config"]["calibration"]["cols"], 99);
  EXPECT_EQ(config["quantization_config"]["original_quantization_config"]["quant_method"], "fp8");
  EXPECT_FALSE(config["quantization_config"].contains("mtp_bits"));

  const Json index = read_json_file(dir / "pack/model.safetensors.index.json").value();
  EXPECT_EQ(index["weight_map"]["layers.0.attn.wq_a.trellis"], "model-00001-of-00001.safetensors");
  EXPECT_EQ(index["metadata"]["total_size"], 256 * 128 * 3 / 8 + 2 * 256 + 2 * 128 + 4 + 2 * 256);

  const Json storage = read_json_file(dir / "pack/quantization_config.json").value()["tensor_storage"];
  const Json& module = storage["layers.0.attn.wq_a"];
  EXPECT_EQ(module["quant_format"], "exl3");
  EXPECT_EQ(module["bits_per_weight"], 3);
  EXPECT_EQ(module["mul1_multiplier"], 2212286765u);
  EXPECT_EQ(module["stored_tensors"]["layers.0.attn.wq_a.trellis"]["shape"], Json({16, 8, 48}));
  EXPECT_EQ(module["stored_tensors"]["layers.0.attn.wq_a.trellis"]["dtype"], "torch.int16");
  EXPECT_FALSE(storage["layers.0.attn.wq_a_norm"].contains("quant_format"));
}

TEST(Pack, a_trellis_of_an_impossible_shape_is_refused_by_name) {
  const test::TempFolder dir;
  const Tensor bad(DType::kI16, {16, 8, 47});
  ASSERT_TRUE(write_safetensors(dir / "model-00001-of-00001.safetensors", {{"layers.0.x.trellis", bad.view()}}).ok());
  const Result<PackSummary> s = summarise_shards(dir.path());
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.error().message(),
              HasSubstr("'layers.0.x.trellis': expected I16 [in/16, out/16, 16 x bits], found I16 [16, 8, 47]"));
}

TEST(Pack, side_files_are_copied_unchanged_and_weights_and_data_are_not) {
  const test::TempFolder dir;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "LICENCES.md",
                           "generation_config.json", "encoding/a.py", "encoding/deep/b.txt"}) {
    test::write_file(dir / "source" / name, std::string("content of ") + name);
  }
  for (const char* name :
       {"model.safetensors", "model.safetensors.index.json", "config.json", "data/panel.jsonl", "README.md"}) {
    test::write_file(dir / "source" / name, "not wanted");
  }
  std::filesystem::create_directory_symlink(dir / "source/encoding", dir / "source/encoding/loop");
  std::filesystem::create_directories(dir / "pack");
  const Result<std::vector<std::string>> names = copy_side_files(dir / "source", dir / "pack");
  ASSERT_TRUE(names.ok()) << names.error().message();
  EXPECT_THAT(*names,
              ElementsAre("LICENCES.md", "LICENSE", "chat_template.jinja", "encoding/a.py", "encoding/deep/b.txt",
                          "generation_config.json", "tokenizer.json", "tokenizer_config.json"));
  EXPECT_EQ(read_text_file(dir / "pack/encoding/deep/b.txt").value(), "content of encoding/deep/b.txt");
}

TEST(Pack, the_manifest_is_sorted_and_covers_every_file_but_itself) {
  const test::TempFolder dir;
  test::write_file(dir / "b.txt", "two");
  test::write_file(dir / "a/z.txt", "one");
  SilentProgress progress;
  const Result<uint64_t> size = write_manifest(dir.path(), progress);
  ASSERT_TRUE(size.ok());
  const std::string text = read_text_file(dir / "MANIFEST.sha256").value();
  EXPECT_EQ(text,
            sha256_hex(std::string_view("one")) + "  a/z.txt\n" + sha256_hex(std::string_view("two")) + "  b.txt\n");
  EXPECT_EQ(*size, 6 + text.size());
}

}  // namespace
}  // namespace espalier
