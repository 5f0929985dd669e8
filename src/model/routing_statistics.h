// What routing does to the experts: their shares of a layer's routed output and how often they are read. Part of the
// statistics folder that `espalier calibrate` writes (`routing.safetensors`), beside the width library's measured
// errors (`errors.safetensors`).
//
// Arrays are dense, [n_layers, n_experts, …] in row-major order. Source: quality.md 2.3, 2.6 and 3.1;
// docs/formats/sensitivity.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"

namespace espalier {

inline constexpr char kRoutingSchema[] = "espalier-routing-1";
inline constexpr char kErrorsSchema[] = "espalier-errors-1";
inline constexpr char kRoutingFile[] = "routing.safetensors";
inline constexpr char kErrorsFile[] = "errors.safetensors";

// What shares and frequencies are quotients of: sums over tokens. [n_blocks, n_experts, n_domains] where nothing else is
// said.
struct RoutingCounts {
  std::vector<int64_t> tokens;         // routed to the expert
  std::vector<double> weight;          // sum of their routing weights g, routed scale included
  std::vector<double> weight_square;   // sum of g^2
  std::vector<double> energy;          // sum of g^2 |W2 h|^2
  std::vector<int64_t> positions;      // [n_blocks, n_domains] tokens of the block
  std::vector<double> output_energy;   // [n_blocks, n_domains] sum of |routed output|^2
};

struct RoutingStatistics {
  std::vector<std::string> domains;
  std::vector<float> share;  // [n_layers, n_experts, n_domains] of the layer's squared routed output, >= 0
  std::vector<float>
      reads_routed;  // [n_layers, n_experts] expected reads per token, in [0, 1]; a layer's sum is n_active
  std::vector<float> reads_served;              // the same with experts pruned as served; empty: not measured
  std::optional<RoutingCounts> counts;          // of the backbone's layers
  std::optional<RoutingCounts> drafter_counts;  // of the drafter's stages, by its own n_experts
  std::map<std::string, std::string> metadata;  // expert_top_p, min_experts, hashes of the inputs
  std::string sha256;                           // of the file; set by the reader
};

// Relative squared errors that a width library measured. Not-a-number where a matrix was not encoded at a width.
struct MatrixErrors {
  std::vector<int> widths;   // half bits, ascending
  std::vector<float> error;  // [n_layers, n_experts, 3 (w1, w3, w2), n_widths]
  std::map<std::string, std::string> metadata;
  std::string sha256;
};

// Errors: those of the safetensors reader; data_loss naming the file, the array, expected and found: another schema, a
// missing array, a wrong shape or type, a value out of range. Threads: pure.
Result<RoutingStatistics> read_routing_statistics(const std::filesystem::path& path, const Config& config);
Result<MatrixErrors> read_matrix_errors(const std::filesystem::path& path, const Config& config);

// Whole or not at all.
Status write_routing_statistics(const std::filesystem::path& path, const RoutingStatistics& statistics,
                                const Config& config);
Status write_matrix_errors(const std::filesystem::path& path, const MatrixErrors& errors, const Config& config);

}  // namespace espalier
