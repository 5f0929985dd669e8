// The sensitivity table: how much KL one unit of relative output error costs, per layer and domain, with the part that
// no width changes and how the layers' parts add up. What `espalier sensitivity` measures and `espalier plan` reads.
//
//     K_d(plan) = floor_d + additivity_d * sum_l slope_{l,d} * sum_e share_{l,e,d} * error_e(widths)
//
// Shares and read frequencies lie in the statistics folder (routing_statistics.h) and are named by sha256. Source:
// quality.md 2.4 to 2.7 and 3.6; docs/formats/sensitivity.md.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/config.h"

namespace espalier {

inline constexpr char kSensitivitySchema[] = "espalier-sensitivity-1";

// Relative squared error of a matrix at a width, where none was measured: (error_at_2 * ratio^(2 - bits))^exponent.
// Source: quality.md 2.2 (exllamav3's 0.292 and 1.96 per bit).
struct AmplitudeLaw {
  double error_at_2 = 0.292;
  double ratio = 1.96;
  double exponent = 2;

  double error(double bits) const;
  bool operator==(const AmplitudeLaw&) const = default;
};

// What the same relative error of w1, w3 or w2 costs, relative to each other; only the proportions count.
struct MatrixFactors {
  double w1 = 1, w3 = 1, w2 = 1;
  double sum() const { return w1 + w3 + w2; }
  bool operator==(const MatrixFactors&) const = default;
};

struct SensitivityDomain {
  std::string name;
  double weight = 1;  // in the objective
  int64_t positions = 0, blocks = 0;
  double floor = 0;       // nats that remain with no width-dependent error
  double additivity = 1;  // all layers at once over the sum of single layers, floors taken off
  bool operator==(const SensitivityDomain&) const = default;
};

// One measured swap of a layer against a reference pack, per domain.
struct SwapKl {
  std::vector<double> mean, se;
  bool operator==(const SwapKl&) const = default;
};

struct LayerSensitivity {
  std::vector<double> floor, slope, slope_se;  // [n_domains]; slope >= 0
  std::vector<double> noise;                   // estimator A, [n_domains] or empty
  std::map<std::string, SwapKl> swaps;         // by the reference pack's name
  std::optional<MatrixFactors> factors;        // absent: those of the table
  bool operator==(const LayerSensitivity&) const = default;
};

// Slopes measured around a plan (all layers quantized, one restored) instead of around the native model.
struct SensitivityBase {
  std::string plan_sha256;
  std::vector<double> kl;  // [n_domains] of that plan as a whole
  bool operator==(const SensitivityBase&) const = default;
};

struct Sensitivity {
  std::string method;          // "swap", "noise", …
  std::string model_identity;  // empty: not said
  std::vector<SensitivityDomain> domains;
  std::vector<LayerSensitivity> layers;  // [n_layers]
  AmplitudeLaw law;
  MatrixFactors factors;
  std::optional<SensitivityBase> base;
  std::string routing_sha256;                 // of routing.safetensors; empty: not said
  std::string errors_sha256;                  // of errors.safetensors; empty: none were used
  std::string blocks_sha256;                  // of the per-block slopes; empty: none
  std::map<std::string, std::string> inputs;  // further hashes: data, checkpoint, packs

  const MatrixFactors& factors_of(size_t layer) const {
    return layers[layer].factors ? *layers[layer].factors : factors;
  }
  bool operator==(const Sensitivity&) const = default;
};

// Errors: data_loss naming `what`, the key, expected and found: another schema, a layer count or expert count that is
// not the config's, a missing key, a list of the wrong length, a number that is negative, too large or not finite, a
// domain twice. Threads: pure; fuzz target sensitivity_fuzz.cpp.
Result<Sensitivity> parse_sensitivity(std::string_view json_text, std::string_view what, const Config& config);

std::string sensitivity_json(const Sensitivity& table, const Config& config);

}  // namespace espalier
