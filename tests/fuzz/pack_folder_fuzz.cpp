// module: model
// mutations: 10000
// Any bytes given as the index, config.json, quantization_config.json, the plan, the tensorfold layout's facts or run.json of a folder
// end in findings or a message. The first byte chooses the file; the folder has one shard, two empty ones and a fixed config.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "base/check.h"
#include "format/safetensors.h"
#include "model/inventory.h"
#include "model/pack_metadata.h"

namespace {

namespace fs = std::filesystem;
using espalier::DType;
using espalier::Tensor;

struct Folder {
  Folder() : path(fs::temp_directory_path() / ("espalier_folder_fuzz_" + std::to_string(::getpid()))) {
    fs::create_directories(path);
    const Tensor trellis(DType::kI16, {8, 8, 48}), suh(DType::kF16, {128}), marker(DType::kI32, {});
    const auto status = espalier::write_safetensors(path / "a.safetensors", {{"head.trellis", trellis.view()},
                                                                             {"head.suh", suh.view()},
                                                                             {"head.svh", suh.view()},
                                                                             {"head.mul1", marker.view()}});
    CHECK(status.ok()) << status.message();
    for (const char* name : {"layer-00.safetensors", "head-mtp.safetensors"}) {
      CHECK(espalier::write_safetensors(path / name, {}).ok()) << name;
    }
    config.n_layers = 1;
    config.n_experts = 1;
    config.d_model = config.d_ff = config.vocab = config.head_dim = config.q_lora_rank = config.o_lora_rank = 128;
    config.n_heads = config.o_groups = 1;
    config.compress_ratios = {0};
    config.n_streams = 4;
  }
  ~Folder() {
    std::error_code ec;
    fs::remove_all(path, ec);
  }
  void put(const char* name, std::string_view text) const { std::ofstream(path / name, std::ios::binary) << text; }

  fs::path path;
  espalier::Config config;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::error_code ec;
  for (const char* name : {"model.safetensors.index.json", "quantization_config.json", "exl3_moe_plan.json", "run.json",
                           espalier::kFactsFile}) {
    fs::remove(folder.path / name, ec);
  }
  folder.put("config.json", R"({"quantization_config":{"quant_method":"exl3","codebook":"mul1"}})");
  switch (data[0] % 6) {
    case 0:
      folder.put("model.safetensors.index.json", text);
      break;
    case 1:
      folder.put("quantization_config.json", text);
      break;
    case 2:
      folder.put("config.json", text);
      break;
    case 3:
      folder.put("exl3_moe_plan.json", text);
      break;
    case 4:
      folder.put("run.json", text);
      break;
    default:
      folder.put("config.json", "{}");
      folder.put(espalier::kFactsFile, text);
  }
  const auto index = espalier::open_model_index(folder.path, "", true);
  if (!index.ok()) return 0;
  const auto metadata = espalier::check_pack_metadata(*index, folder.config, espalier::MetadataDepth::kEverything);
  if (metadata.ok()) CHECK(metadata->problems.size() <= 101);
  const auto inventory = espalier::take_inventory(*index, folder.config);
  if (inventory.ok()) CHECK(inventory->n_exl3 <= 1);
  return 0;
}
