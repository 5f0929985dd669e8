// A cut-down copy of the tiny golden checkpoint for tests that encode whole packs: three layers (window-only with
// Engram, ratio-2 source, ratio-2 reuse), one drafter stage, fewer experts. 3.6 M quantizable weights instead of 12.4
// M.
#pragma once

#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "format/tensor_index.h"
#include "unit/stages/tiny_model.h"

namespace espalier::test {

inline constexpr int kSmallExperts = 3;
inline constexpr int kSmallDrafterExperts = 2;

// Writes the checkpoint into `dir`. Routed experts are those from `first_expert` on: another one gives another model.
inline void write_small_checkpoint(const std::filesystem::path& dir, int first_expert = 0) {
  namespace fs = std::filesystem;
  fs::create_directories(dir);
  Json config = read_json_file(tiny_dir() + "/config.json").value();
  Json& text = config["text_config"];
  text["num_hidden_layers"] = 3;
  text["compress_ratios"] = {0, 2, 2, 0};
  text["kv_source_layer_ids"] = {1};
  text["index_source_layer_ids"] = {1};
  text["candidate_source_layer_id"] = nullptr;
  text["engram_layer_ids"] = {0};
  text["engram_num_embeddings"] = {630};
  text["n_routed_experts"] = kSmallExperts;
  text["num_nextn_predict_layers"] = 1;
  text["dspark_target_layer_ids"] = {0, 1, 2};
  text["dspark_n_routed_experts"] = kSmallDrafterExperts;
  config.erase("vision_config");
  ASSERT_TRUE(write_text_file(dir / "config.json", dump_json(config, 1)).ok());
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
    fs::copy_file(fs::path(tiny_dir()) / name, dir / name);
  ASSERT_TRUE(write_text_file(dir / "LICENSE", "test data\n").ok());

  // Layers 1, 2, 3 become 0, 1, 2; the tails of mtp.1 move to mtp.0.
  const TensorIndex index = TensorIndex::open(tiny_dir()).value();
  std::vector<NamedView> tensors;
  for (const std::string& name : index.names()) {
    std::string to;
    for (int layer = 1; layer <= 3; ++layer) {
      const std::string from = "layers." + std::to_string(layer) + ".";
      if (name.rfind(from, 0) == 0) to = "layers." + std::to_string(layer - 1) + "." + name.substr(from.size());
    }
    if (name.rfind("mtp.0.", 0) == 0 || name == "embed.weight" || name == "head.weight" || name == "norm.weight")
      to = name;
    for (const char* tail : {"mtp.1.norm.", "mtp.1.markov_head.", "mtp.1.confidence_head."}) {
      if (name.rfind(tail, 0) == 0) to = "mtp.0." + name.substr(6);
    }
    const size_t at = to.find(".experts.");
    const int n_experts = to.rfind("mtp.", 0) == 0 ? kSmallDrafterExperts : kSmallExperts;
    if (at != std::string::npos) {
      const int expert = std::stoi(to.substr(at + 9)) - first_expert;
      if (expert < 0 || expert >= n_experts) continue;
      to = to.substr(0, at + 9) + std::to_string(expert) + to.substr(to.find('.', at + 9));
    }
    if (to.empty()) continue;
    ConstView view = index.get(name).value();
    if (to.find(".ffn.gate.") != std::string::npos) view.shape[0] = n_experts;  // the first rows of the router
    tensors.push_back({to, view});
  }
  std::sort(tensors.begin(), tensors.end(), [](const NamedView& a, const NamedView& b) {
    const int64_t wide_a = dtype_size_bytes(a.view.dtype);
    const int64_t wide_b = dtype_size_bytes(b.view.dtype);
    return wide_a != wide_b ? wide_a > wide_b : a.name < b.name;
  });
  ASSERT_TRUE(write_safetensors(dir / "model.safetensors", tensors).ok());
}

// One copy per test program, removed at its end.
inline const std::string& small_checkpoint_dir() {
  struct Folder {
    Folder() {
      std::filesystem::remove_all(path);
      write_small_checkpoint(path);
    }
    ~Folder() {
      std::error_code ec;
      std::filesystem::remove_all(path, ec);
    }
    std::string path =
        (std::filesystem::temp_directory_path() / ("espalier_small_checkpoint_" + std::to_string(::getpid()))).string();
  };
  static const Folder folder;
  return folder.path;
}

}  // namespace espalier::test
