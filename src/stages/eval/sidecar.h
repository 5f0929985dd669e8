// The per-position record of an evaluation, so that later comparisons need no forward pass.
//
// One safetensors file of equally long arrays in panel order (docs/formats/sidecar.md). Its metadata names the panel,
// the models and the options; two sidecars compare position by position only when panel and scoring rule are equal.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"

namespace espalier {

struct Sidecar {
  std::vector<int32_t> row;       // index of the panel's row
  std::vector<int32_t> position;  // scored position t; the label is token t + 1
  std::vector<int32_t> domain;    // index into `domains`
  std::vector<float> kl;          // empty when only one model was run
  std::vector<float> nll_reference;
  std::vector<float> nll_candidate;  // empty when only one model was run
  std::vector<float> confidence;     // empty when only one model was run
  std::vector<uint8_t> same_top1;    // empty when only one model was run
  std::vector<std::string> domains;
  std::map<std::string, std::string> metadata;  // schema, panel_sha256, reference, candidate, numerics, …
};

inline constexpr char kSidecarSchema[] = "espalier-sidecar-1";

// Writes the file whole or not at all.
Status write_sidecar(const std::filesystem::path& path, const Sidecar& sidecar);

// Errors: not_found; data_loss for another schema, a missing array, unequal lengths, a domain index out of range.
Result<Sidecar> read_sidecar(const std::filesystem::path& path);

}  // namespace espalier
