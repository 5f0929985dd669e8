// Slopes of single blocks (conversations or documents), for resampling: a layer's slope in a domain is the mean over
// the domain's blocks, weighted by positions. Lies beside a sensitivity table and is named by its `blocks_sha256`.
// Source: quality.md 2.7; docs/formats/sensitivity.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"

namespace espalier {

inline constexpr char kBlocksSchema[] = "espalier-block-slopes-1";

struct BlockSlopes {
  std::vector<std::string> domains;
  std::vector<int32_t> domain;   // [n_blocks] index into domains
  std::vector<float> positions;  // [n_blocks] scored positions, above 0
  std::vector<float> slope;      // [n_blocks, n_layers] finite; noise may be below 0
  std::map<std::string, std::string> metadata;
  std::string sha256;  // of the file; set by the reader
};

// Errors: those of the safetensors reader; data_loss naming the file, the array, expected and found. Threads: pure.
Result<BlockSlopes> read_block_slopes(const std::filesystem::path& path, const Config& config);
// Whole or not at all.
Status write_block_slopes(const std::filesystem::path& path, const BlockSlopes& blocks, const Config& config);

}  // namespace espalier
