// The golden allocation instance of quality.md 3.4: 40 layers of 384 experts whose sensitivities are quantiles in a
// fixed order, no random numbers.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "stages/plan/allocation.h"

namespace espalier {

// Standard normal quantile: bisection over erfc until neighbouring doubles.
inline double normal_quantile(double p) {
  double low = -10, high = 10;
  while (true) {
    const double middle = low + (high - low) / 2;
    if (!(middle > low && middle < high)) return middle;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
}

struct GoldenInstance {
  static constexpr int kLayers = 40, kExperts = 384;
  std::vector<double> layer;       // s_l
  std::vector<double> share;       // [40 * 384] q_le / sum_e q_le * r_le
  std::vector<double> reads;       // f_le, 240 in all
  std::vector<double> importance;  // I_le, 1 in all

  GoldenInstance() {
    std::vector<double> z(kExperts);
    for (int k = 0; k < kExperts; ++k) z[static_cast<size_t>(k)] = normal_quantile((k + 0.5) / kExperts);
    const auto at = [&](int k) { return z[static_cast<size_t>(k % kExperts)]; };
    double total = 0;
    for (int l = 0; l < kLayers; ++l) {
      layer.push_back(std::exp(0.6 * normal_quantile(((17 * l) % kLayers + 0.5) / kLayers)));
      std::vector<double> q;
      double sum = 0;
      for (int e = 0; e < kExperts; ++e) {
        q.push_back(std::exp(0.9 * at(131 * e + 7 * l)));
        sum += q.back();
      }
      for (int e = 0; e < kExperts; ++e) {
        const double frequency = q[static_cast<size_t>(e)] / sum;
        reads.push_back(6 * frequency);
        share.push_back(frequency * std::exp(0.4 * at(197 * e + 101 * l)));
        importance.push_back(layer.back() * share.back());
        total += importance.back();
      }
    }
    for (double& i : importance) i /= total;
  }

  static double error_at(double bits) { return std::pow(0.292 * std::pow(1.96, 2 - bits), 2); }

  // Every item counts `weights` weights and is split into `parts` items that share its sensitivity.
  AllocationProblem problem(double bpw, std::optional<double> read_cap, int parts = 1) const {
    AllocationProblem out;
    out.domains = {{"all", 1, 0, 1, std::nullopt}};
    ReadBits n_reads = 0;
    for (size_t i = 0; i < importance.size(); ++i) {
      for (int part = 0; part < parts; ++part) {
        AllocationItem item;
        for (int bits = 2; bits <= 5; ++bits) item.options.push_back({bits, 2 * bits, error_at(bits)});
        item.reads = std::llround(reads[i] * 0x1p28);
        n_reads += item.reads;
        out.items.push_back(std::move(item));
        out.slopes.push_back(importance[i] / parts);
      }
    }
    out.storage_limit = static_cast<int64_t>(*half_bits_at(bpw, static_cast<ReadBits>(out.items.size())));
    if (read_cap) out.read_limit = *half_bits_at(*read_cap, n_reads);
    return out;
  }
};

}  // namespace espalier
