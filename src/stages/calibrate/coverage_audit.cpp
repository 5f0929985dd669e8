#include "stages/calibrate/coverage_audit.h"

#include <algorithm>
#include <limits>

#include "model/names.h"

namespace espalier {

bool CoverageAudit::holds(int64_t min_tokens, int64_t d_model) const {
  return fewest_tokens >= (min_tokens > 0 ? min_tokens : d_model);
}

CoverageAudit audit_coverage(const Config& config, const RoutingCounts& backbone, const RoutingCounts* drafter) {
  CoverageAudit out;
  int64_t total = 0;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  const auto audit = [&](const RoutingCounts& counts, int first_block, int n_blocks, int64_t n_experts) {
    if (n_blocks == 0 || n_experts == 0) return;
    const auto n_domains = static_cast<int64_t>(counts.tokens.size()) / (n_blocks * n_experts);
    for (int block = 0; block < n_blocks; ++block) {
      for (int64_t e = 0; e < n_experts; ++e) {
        int64_t tokens = 0;
        const int64_t at = (block * n_experts + e) * n_domains;
        for (int64_t d = 0; d < n_domains; ++d) tokens += counts.tokens[static_cast<size_t>(at + d)];
        const std::string name = block_prefix(config, first_block + block) + "ffn.experts." + std::to_string(e);
        if (tokens == 0) out.without_tokens.push_back(name);
        if (tokens > 0 && tokens < config.d_model) out.thin.push_back({name, tokens, tokens < config.d_ff});
        ++out.n_experts;
        total += tokens;
        fewest = std::min(fewest, tokens);
      }
    }
  };
  audit(backbone, 0, config.n_layers, config.n_experts);
  if (drafter != nullptr) audit(*drafter, config.n_layers, config.drafter.n_stages, config.drafter.n_experts);
  if (out.n_experts > 0) {
    out.fewest_tokens = fewest;
    out.mean_tokens = static_cast<double>(total) / static_cast<double>(out.n_experts);
  }
  return out;
}

}  // namespace espalier
