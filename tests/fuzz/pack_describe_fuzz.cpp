// module: stages
// mutations: 4000
// Any bytes given as config.json or exl3_pack.json of a pack end in the facts that it states or a message, and in a description in
// every layout whose JSON is read back. The first byte chooses the file.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/check.h"
#include "format/json.h"
#include "model/config.h"
#include "model/pack_plan.h"
#include "stages/pack/describe.h"

namespace {

namespace fs = std::filesystem;
using espalier::DType;
using espalier::Layout;

struct Folder {
  Folder() : path(fs::temp_directory_path() / ("espalier_describe_fuzz_" + std::to_string(::getpid()))) {
    fs::create_directories(path);
  }
  ~Folder() {
    std::error_code ec;
    fs::remove_all(path, ec);
  }
  void put(const char* name, std::string_view text) const { std::ofstream(path / name, std::ios::binary) << text; }
  fs::path path;
};

const std::vector<espalier::SafetensorsWriter::Declaration> kTensors = {
    {"head.trellis", DType::kI16, {8, 8, 48}}, {"head.suh", DType::kF16, {128}}, {"head.svh", DType::kF16, {128}},
    {"head.mul1", DType::kI32, {}},            {"norm.weight", DType::kBF16, {128}}};

void describe(const std::string& config, espalier::PackFacts facts) {
  for (const Layout layout : {Layout::kExllamav3, Layout::kVllm, Layout::kTensorfold}) {
    const auto texts = espalier::describe_pack(layout, config, facts, kTensors, espalier::group_tensors(layout, kTensors, 4));
    if (!texts.ok()) continue;
    for (const auto& text : *texts) {
      const auto json = espalier::parse_json(text.text, text.name);
      // One level more than the config had is one too many for a config as deep as may be read.
      CHECK(json.ok() || json.error().message().find("nested deeper") != std::string::npos) << json.error().message();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 == 0) {
    const auto config = espalier::parse_config(text, "config.json");
    if (config.ok() && (config->n_experts > 16 || config->drafter.n_experts > 16 || config->n_layers > 16)) return 0;
    describe(text, {});
    folder.put("config.json", text);
    std::error_code ec;
    fs::remove(folder.path / espalier::kFactsFile, ec);
    (void)espalier::stated_facts(folder.path, Layout::kExllamav3).ok();
    return 0;
  }
  folder.put("config.json", "{}");
  folder.put(espalier::kFactsFile, text);
  if (const auto facts = espalier::stated_facts(folder.path, Layout::kTensorfold); facts.ok()) {
    CHECK(facts->calibration_rows >= 0 && facts->calibration_cols >= 0);
    describe("{}", *facts);
  }
  return 0;
}
