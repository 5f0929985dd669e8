#include "stages/calibrate/routing_counter.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "ops/parallel.h"

namespace espalier {
namespace {

bool all_finite(const float* x, int64_t n) {
  return std::all_of(x, x + n, [](float v) { return std::isfinite(v); });
}

double squared(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

}  // namespace

RoutingCounter::RoutingCounter(int n_blocks, int64_t n_experts, int64_t n_domains, std::optional<ExpertPruning> pruning,
                               ThreadPool& pool)
    : n_blocks_(n_blocks), n_experts_(n_experts), n_domains_(n_domains), pruning_(pruning), pool_(pool) {
  const auto experts = static_cast<size_t>(n_blocks_ * n_experts_ * n_domains_);
  const auto blocks = static_cast<size_t>(n_blocks_ * n_domains_);
  counts_.tokens.resize(experts);
  counts_.weight.resize(experts);
  counts_.weight_square.resize(experts);
  counts_.energy.resize(experts);
  counts_.positions.resize(blocks);
  counts_.output_energy.resize(blocks);
  if (pruning_) served_.resize(static_cast<size_t>(n_blocks_ * n_experts_));
}

void RoutingCounter::begin_row(int block, int64_t domain) {
  CHECK(block >= 0 && block < n_blocks_ && domain >= 0 && domain < n_domains_) << block << ", " << domain;
  block_ = block;
  domain_ = domain;
  row_dropped_ = false;
}

void RoutingCounter::moe_input(std::string_view block_prefix, const float* x, int64_t n_rows, int64_t d_model,
                               const int32_t* ids, const float* weights, int64_t n_active) {
  (void)block_prefix;
  ids_.assign(ids, ids + n_rows * n_active);
  weights_.assign(weights, weights + n_rows * n_active);
  finite_.resize(static_cast<size_t>(n_rows));
  for (int64_t t = 0; t < n_rows; ++t) {
    finite_[static_cast<size_t>(t)] =
        all_finite(x + t * d_model, d_model) && all_finite(weights + t * n_active, n_active);
  }
}

void RoutingCounter::expert_outputs(std::string_view block_prefix, const float* outputs, int64_t n_rows,
                                    int64_t n_active, int64_t d_model) {
  (void)block_prefix;
  CHECK(static_cast<size_t>(n_rows * n_active) == ids_.size()) << "expert_outputs without its moe_input";
  // Per token: |g W2 h|^2 of every place, then |y|^2.
  const int64_t stride = n_active + 1;
  std::vector<double> energy(static_cast<size_t>(n_rows * stride));
  ops::for_rows(pool_, n_rows, 2.0 * static_cast<double>(stride * d_model), [&](int64_t begin, int64_t end) {
    std::vector<float> y(static_cast<size_t>(d_model));
    for (int64_t t = begin; t < end; ++t) {
      std::fill(y.begin(), y.end(), 0.0f);
      for (int64_t i = 0; i < n_active; ++i) {
        const float* out = outputs + (t * n_active + i) * d_model;
        energy[static_cast<size_t>(t * stride + i)] = squared(out, d_model);
        for (int64_t j = 0; j < d_model; ++j) y[static_cast<size_t>(j)] += out[j];
      }
      energy[static_cast<size_t>(t * stride + n_active)] = squared(y.data(), d_model);
    }
  });
  const int64_t at_block = block_ * n_domains_ + domain_;
  std::vector<uint8_t> kept(static_cast<size_t>(n_active));
  for (int64_t t = 0; t < n_rows; ++t) {
    const double* e = energy.data() + t * stride;
    const bool is_finite = finite_[static_cast<size_t>(t)] != 0 &&
                           std::all_of(e, e + stride, [](double v) { return std::isfinite(v); });
    if (!is_finite) {
      ++dropped_;
      row_dropped_ = true;
      continue;
    }
    ++counts_.positions[static_cast<size_t>(at_block)];
    counts_.output_energy[static_cast<size_t>(at_block)] += e[n_active];
    const float* weights = weights_.data() + t * n_active;
    if (pruning_) keep_experts(*pruning_, weights, n_active, kept.data());
    for (int64_t i = 0; i < n_active; ++i) {
      const int64_t expert = ids_[static_cast<size_t>(t * n_active + i)];
      const auto at = static_cast<size_t>((block_ * n_experts_ + expert) * n_domains_ + domain_);
      const auto g = static_cast<double>(weights[i]);
      ++counts_.tokens[at];
      counts_.weight[at] += g;
      counts_.weight_square[at] += g * g;
      counts_.energy[at] += e[i];
      if (pruning_ && kept[static_cast<size_t>(i)] != 0) ++served_[static_cast<size_t>(block_ * n_experts_ + expert)];
    }
  }
}

std::vector<float> RoutingCounter::shares() const {
  std::vector<float> out(counts_.energy.size());
  for (int64_t block = 0; block < n_blocks_; ++block) {
    for (int64_t e = 0; e < n_experts_; ++e) {
      for (int64_t d = 0; d < n_domains_; ++d) {
        const double total = counts_.output_energy[static_cast<size_t>(block * n_domains_ + d)];
        const auto at = static_cast<size_t>((block * n_experts_ + e) * n_domains_ + d);
        if (total > 0) out[at] = static_cast<float>(counts_.energy[at] / total);
      }
    }
  }
  return out;
}

std::vector<int64_t> RoutingCounter::tokens_of_experts() const {
  std::vector<int64_t> out(static_cast<size_t>(n_blocks_ * n_experts_));
  for (size_t i = 0; i < counts_.tokens.size(); ++i) out[i / static_cast<size_t>(n_domains_)] += counts_.tokens[i];
  return out;
}

std::vector<float> RoutingCounter::per_position(const std::vector<int64_t>& per_expert) const {
  std::vector<float> out(per_expert.size());
  for (int64_t block = 0; block < n_blocks_; ++block) {
    int64_t positions = 0;
    for (int64_t d = 0; d < n_domains_; ++d) positions += counts_.positions[static_cast<size_t>(block * n_domains_ + d)];
    for (int64_t e = 0; e < n_experts_ && positions > 0; ++e) {
      const auto at = static_cast<size_t>(block * n_experts_ + e);
      out[at] = static_cast<float>(static_cast<double>(per_expert[at]) / static_cast<double>(positions));
    }
  }
  return out;
}

std::vector<float> RoutingCounter::reads_routed() const {
  return per_position(tokens_of_experts());
}

std::vector<float> RoutingCounter::reads_served() const {
  return served_.empty() ? std::vector<float>() : per_position(served_);
}

}  // namespace espalier
