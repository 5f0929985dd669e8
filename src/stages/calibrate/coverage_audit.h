// Which experts a calibration set does not cover: without any token, or with fewer than its matrices have inputs, so that
// their Hessians are singular without a prior. Source: quality.md 1.2, 1.4.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/routing_statistics.h"

namespace espalier {

struct ThinExpert {
  std::string name;    // "layers.3.ffn.experts.7"
  int64_t tokens = 0;  // at least one
  bool is_w2_thin = false;  // fewer than d_ff as well; w1 and w3 (d_model inputs) are thin in any case
};

struct CoverageAudit {
  int64_t n_experts = 0;                    // audited: backbone and drafter
  std::vector<std::string> without_tokens;  // names, order of the forward pass
  std::vector<ThinExpert> thin;             // fewer than d_model tokens, but some
  int64_t fewest_tokens = 0;
  double mean_tokens = 0;

  // Every expert has at least min_tokens tokens (0: as many as w1 and w3 have inputs).
  bool holds(int64_t min_tokens, int64_t d_model) const;
};

// drafter: null when the checkpoint has none.
CoverageAudit audit_coverage(const Config& config, const RoutingCounts& backbone, const RoutingCounts* drafter);

}  // namespace espalier
