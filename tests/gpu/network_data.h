// What the tests of the network on the GPU share: models, logits, a pack of random matrices.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "format/tensor_index.h"
#include "model/cuda/network.h"
#include "model/names.h"
#include "tests/gpu/ops_data.h"
#include "unit/model/golden_fixture.h"

namespace espalier::cuda {

using codec::cuda::must;
using codec::cuda::taken;
using ops::bit_differences;

inline std::shared_ptr<const DeviceModel> load(const std::string& dir, Products products = Products::kExact) {
  LoadOptions options;
  options.products = products;
  return taken(DeviceModel::load(dir, options, 0, test_pool()));
}

inline std::shared_ptr<const DeviceModel> tiny() {
  static const std::shared_ptr<const DeviceModel> model = load(golden_dir() + "/tiny-a");
  return model;
}

inline std::vector<float> values(const Tensor& t) { return {t.f32(), t.f32() + t.size()}; }

// Recorded passes, unless ESPALIER_TEST_NO_GRAPHS is set: then a fault of recording does not hide the rest.
inline bool with_graphs() { return std::getenv("ESPALIER_TEST_NO_GRAPHS") == nullptr; }

// Logits of every position, fed in calls of `call` tokens, each in chunks of `chunk`.
inline std::vector<float> device_logits(const std::shared_ptr<const DeviceModel>& model, const std::vector<int32_t>& ids, Numerics numerics, int64_t call,
                                        int64_t chunk = 256, bool uses_graphs = with_graphs()) {
  const auto sequence = taken(DeviceSequence::create(model, {numerics, false, chunk, uses_graphs}));
  std::vector<float> out;
  for (size_t at = 0; at < ids.size(); at += static_cast<size_t>(call)) {
    const size_t n = std::min(static_cast<size_t>(call), ids.size() - at);
    const Tensor logits = taken(sequence->forward({ids.data() + at, n}, true));
    out.insert(out.end(), logits.f32(), logits.f32() + logits.size());
  }
  return out;
}

// The tiny checkpoint with every matrix that can be one replaced by a random EXL3 matrix, of all widths in turn.
class RandomPack {
 public:
  // only_mul1: all of the mul1 codebook, else all codebooks in turn. takes_all: every expert and every entry is used, so that nothing in the
  // network is chosen and the logits are a continuous function of its matrices.
  explicit RandomPack(bool only_mul1, bool takes_all = false)
      : dir_(std::filesystem::temp_directory_path() /
             ("espalier_gpu_pack_" + std::to_string(getpid()) + (only_mul1 ? "_mul1" : "") + (takes_all ? "_all" : ""))) {
    namespace fs = std::filesystem;
    const std::string from = golden_dir() + "/tiny-a";
    fs::remove_all(dir_);
    fs::create_directories(dir_);
    fs::copy_file(from + "/tokenizer.json", dir_ / "tokenizer.json");
    nlohmann::json json = nlohmann::json::parse(std::ifstream(from + "/config.json"));
    if (takes_all) {
      nlohmann::json& text = json["text_config"];
      text["num_experts_per_tok"] = text["n_routed_experts"];
      text["index_topk"] = text["candidate_topk_blocks"] = 1024;
    }
    std::ofstream(dir_ / "config.json") << json;
    const TensorIndex index = taken(TensorIndex::open(from));
    const Config config = taken(load_config(dir_.string()));
    std::map<std::string, ConstView> tensors;
    for (const std::string& name : index.names()) tensors[name] = *index.find(name);
    std::vector<codec::Exl3Tensor> owned;
    const std::vector<MatrixSpec> specs = quantizable_matrices(config);
    owned.reserve(specs.size());
    for (size_t i = 0; i < specs.size(); ++i) {
      const MatrixSpec& spec = specs[i];
      const std::string native = spec.kind == MatrixKind::kWoA ? block_prefix(config, spec.block) + "attn.wo_a" : spec.stem;
      tensors.erase(native + ".weight");
      tensors.erase(native + ".scale");
      const auto codebook = only_mul1 || i % 4 > 1 ? codec::Codebook::kMul1 : i % 4 == 0 ? codec::Codebook::kMcg : codec::Codebook::k3Inst;
      const int k2 = codebook == codec::Codebook::kMul1 ? codec::cuda::kAllWidths[i % 11] : static_cast<int>(2 + 2 * (i % 8));
      owned.push_back(codec::cuda::random_tensor(spec.in, spec.out, k2, codebook, spec.stem));
      for (const codec::NamedPart& part : codec::stored_parts(spec.stem, owned.back())) tensors[part.name] = part.view;
    }
    std::vector<NamedView> views;
    for (const auto& [name, view] : tensors) views.push_back({name, view});
    must(write_safetensors(dir_ / "model.safetensors", views));
  }
  ~RandomPack() { std::filesystem::remove_all(dir_); }
  std::string dir() const { return dir_.string(); }

 private:
  std::filesystem::path dir_;
};

}  // namespace espalier::cuda
