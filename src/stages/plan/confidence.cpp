#include "stages/plan/confidence.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"

namespace espalier {
namespace {

constexpr double kStable = 0.9;

// Two uniform numbers to one normal: Box and Muller.
double normal(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

// Linear interpolation between order statistics, as in the evaluation's percentiles.
double quantile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  const double at = p * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

class Resampler {
 public:
  Resampler(const Sensitivity& table, const BlockSlopes* blocks, uint64_t seed)
      : table_(table), blocks_(blocks), seed_(seed) {}

  Status prepare() {
    if (blocks_ == nullptr) return ok_status();
    for (const SensitivityDomain& domain : table_.domains) {
      const auto at = std::find(blocks_->domains.begin(), blocks_->domains.end(), domain.name);
      if (at == blocks_->domains.end())
        return failed_precondition("plan: the block slopes have no domain '" + domain.name + "'");
      std::vector<size_t> own;
      for (size_t b = 0; b < blocks_->domain.size(); ++b) {
        if (blocks_->domain[b] == at - blocks_->domains.begin()) own.push_back(b);
      }
      of_domain_.push_back(std::move(own));
    }
    return ok_status();
  }

  Sensitivity draw(int64_t resample) const {
    Sensitivity out = table_;
    const CounterRng rng(seed_ ^ mix64(static_cast<uint64_t>(resample) + 1), "plan confidence");
    const size_t n_domains = out.domains.size(), n_layers = out.layers.size();
    if (blocks_ == nullptr) {
      for (size_t l = 0; l < n_layers; ++l) {
        for (size_t d = 0; d < n_domains; ++d) {
          double& slope = out.layers[l].slope[d];
          slope = std::max(0.0, slope + out.layers[l].slope_se[d] * normal(rng, l * n_domains + d));
        }
      }
      return out;
    }
    uint64_t at = 0;
    for (size_t d = 0; d < n_domains; ++d) {
      const std::vector<size_t>& own = of_domain_[d];
      std::vector<double> sums(n_layers, 0);
      double weight = 0;
      for (size_t k = 0; k < own.size(); ++k) {
        const auto pick =
            std::min(own.size() - 1, static_cast<size_t>(rng.uniform(at++) * static_cast<double>(own.size())));
        const size_t b = own[pick];
        const auto positions = static_cast<double>(blocks_->positions[b]);
        weight += positions;
        for (size_t l = 0; l < n_layers; ++l)
          sums[l] += positions * static_cast<double>(blocks_->slope[b * n_layers + l]);
      }
      for (size_t l = 0; l < n_layers; ++l) out.layers[l].slope[d] = std::max(0.0, sums[l] / weight);
    }
    return out;
  }

 private:
  const Sensitivity& table_;
  const BlockSlopes* blocks_;
  uint64_t seed_;
  std::vector<std::vector<size_t>> of_domain_;
};

struct Draw {
  bool is_solved = false;
  double kl = 0;                 // of the plan in question
  std::vector<double> slopes;    // [n_layers, n_domains]
  std::vector<uint8_t> is_same;  // [n_experts]
};

}  // namespace

Result<PlanConfidence> plan_confidence(const PlanInputs& inputs, const PlanRequest& request, const PlanOutcome& outcome,
                                       const BlockSlopes* blocks, int64_t resamples, ThreadPool& pool,
                                       Progress& progress) {
  Resampler resampler(inputs.table, blocks, request.seed);
  RETURN_IF_ERROR(resampler.prepare());
  std::vector<Draw> draws(static_cast<size_t>(resamples));
  std::vector<Status> failed(draws.size());
  progress.begin("resampling", resamples);
  pool.parallel_for(resamples, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (progress.is_cancelled()) return;
      PlanInputs drawn = inputs;
      drawn.table = resampler.draw(r);
      Draw& draw = draws[static_cast<size_t>(r)];
      const auto errors = ExpertErrors::make(drawn, request);
      if (!errors.ok()) {
        failed[static_cast<size_t>(r)] = errors.error();
        return;
      }
      const auto use = errors->use_of(outcome.plan);
      if (!use.ok()) {
        failed[static_cast<size_t>(r)] = use.error();
        return;
      }
      AllocationProblem problem = outcome.problem.allocation;
      problem.slopes = errors->slopes();
      for (const LayerSensitivity& layer : drawn.table.layers) {
        draw.slopes.insert(draw.slopes.end(), layer.slope.begin(), layer.slope.end());
      }
      draw.kl = use->objective;
      if (const auto found = allocate(problem); found.ok()) {
        draw.is_solved = true;
        const PackPlan again = outcome.problem.plan(found->choice, inputs.config);
        for (int layer = 0; layer < inputs.config.n_layers; ++layer) {
          for (size_t e = 0; e < again.experts.at(layer).size(); ++e) {
            draw.is_same.push_back(again.experts.at(layer)[e] == outcome.plan.experts.at(layer)[e]);
          }
        }
      }
      progress.advance(1);
    }
  });
  if (progress.is_cancelled()) return cancelled("plan: cancelled while resampling");
  for (const Status& status : failed) RETURN_IF_ERROR(status);

  PlanConfidence out;
  out.resamples = resamples;
  out.has_blocks = blocks != nullptr;
  const size_t n_layers = inputs.table.layers.size(), n_domains = inputs.table.domains.size();
  std::vector<double> kl;
  std::vector<std::vector<double>> slopes(n_layers * n_domains);
  std::vector<int64_t> same(n_layers * static_cast<size_t>(inputs.config.n_experts), 0);
  for (const Draw& draw : draws) {
    if (!draw.is_solved) {
      ++out.infeasible;
      continue;
    }
    kl.push_back(draw.kl);
    for (size_t i = 0; i < slopes.size(); ++i) slopes[i].push_back(draw.slopes[i]);
    for (size_t i = 0; i < same.size(); ++i) same[i] += draw.is_same[i];
  }
  if (kl.empty())
    return failed_precondition("plan: the limits could not be met in any of " + std::to_string(resamples) +
                               " resamples");
  out.kl_low = quantile(kl, 0.025);
  out.kl_high = quantile(kl, 0.975);
  for (const std::vector<double>& s : slopes) {
    out.slope_low.push_back(quantile(s, 0.025));
    out.slope_high.push_back(quantile(s, 0.975));
  }
  const auto per_layer = static_cast<size_t>(inputs.config.n_experts);
  size_t n_stable = 0;
  for (size_t l = 0; l < n_layers; ++l) {
    size_t n = 0;
    for (size_t e = 0; e < per_layer; ++e) {
      n += static_cast<double>(same[l * per_layer + e]) >= kStable * static_cast<double>(kl.size()) ? 1 : 0;
    }
    out.layer_stable.push_back(static_cast<double>(n) / static_cast<double>(per_layer));
    n_stable += n;
  }
  out.stable_share = static_cast<double>(n_stable) / static_cast<double>(same.size());
  return out;
}

}  // namespace espalier
