// How long does the allocator take at the real size, and how far from the optimum does it stop?
//
// Method: 46,080 items (40 layers x 384 experts x 3 matrices of 5120 x 2304) with log-normal layer sensitivity (spread
// 0.6), read frequency (0.9) and residual (0.4), six domains with slopes that differ by 0.3; widths 2 to 5, or 1 to 8
// with half steps. Wall and CPU time of allocate() with one thread, the best of five runs, and the gap that it reports.
// Usage: bench_allocate
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "base/rng.h"
#include "stages/plan/allocation.h"

namespace {

using namespace espalier;

constexpr int kLayers = 40, kExperts = 384, kDomains = 6;
constexpr int64_t kWeights = 5120 * 2304;

std::string machine_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

double normal(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

AllocationProblem make_problem(bool all_widths) {
  const CounterRng rng(1, "allocate");
  uint64_t at = 0;
  AllocationProblem p;
  for (int d = 0; d < kDomains; ++d)
    p.domains.push_back({"domain " + std::to_string(d), 1.0 / kDomains, 0.001, 1, std::nullopt});
  for (int l = 0; l < kLayers; ++l) {
    std::vector<double> layer;
    const double common = 0.6 * normal(rng, at++);
    for (int d = 0; d < kDomains; ++d) layer.push_back(std::exp(common + 0.3 * normal(rng, at++)));
    for (int e = 0; e < kExperts; ++e) {
      const double frequency = std::exp(0.9 * normal(rng, at++)) / kExperts;
      for (int m = 0; m < 3; ++m) {
        const double residual = std::exp(0.4 * normal(rng, at++));
        AllocationItem item;
        for (int k2 = 2; k2 <= 16; ++k2) {
          const bool is_whole = k2 % 2 == 0;
          if (all_widths ? !(is_whole || k2 < 8) : !(is_whole && k2 >= 4 && k2 <= 10)) continue;
          item.options.push_back({k2, kWeights * k2, std::pow(0.292 * std::pow(1.96, 2 - k2 / 2.0), 2)});
        }
        item.reads = std::llround(frequency * 0x1p26);
        p.items.push_back(std::move(item));
        for (int d = 0; d < kDomains; ++d)
          p.slopes.push_back(0.02 * frequency * residual * layer[static_cast<size_t>(d)]);
      }
    }
  }
  return p;
}

void measure(const char* what, const AllocationProblem& p) {
  double best = 1e9, best_cpu = 1e9;
  for (int k = 0; k < 5; ++k) {
    const std::clock_t cpu = std::clock();
    const auto start = std::chrono::steady_clock::now();
    const auto plan = allocate(p);
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::min(best, s);
    best_cpu = std::min(best_cpu, static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC);
    if (!plan.ok()) {
      std::printf("%-44s %s\n", what, plan.error().message().c_str());
      return;
    }
    if (k == 4) {
      std::printf("%-44s %6.3f s, CPU %6.3f s   gap %.1e   %lld dual evaluations, %lld exchanges\n", what, best,
                  best_cpu, plan->gap, static_cast<long long>(plan->dual_evaluations),
                  static_cast<long long>(plan->exchanges));
    }
  }
}

}  // namespace

int main() {
  std::printf("%s, one thread; 46,080 items, 2.7 bits per weight\n", machine_name().c_str());
  for (const bool all_widths : {false, true}) {
    const std::string widths = all_widths ? "1 to 8 and half steps" : "2 to 5";
    AllocationProblem p = make_problem(all_widths);
    ReadBits weights = 0, reads = 0;
    for (const AllocationItem& item : p.items) {
      weights += kWeights;
      reads += static_cast<ReadBits>(item.reads) * kWeights;
    }
    p.storage_limit = static_cast<int64_t>(*half_bits_at(2.7, weights));
    measure((widths + ", storage").c_str(), p);
    p.read_limit = *half_bits_at(2.9, reads);
    measure((widths + ", storage, read cap 2.9").c_str(), p);
    const auto plan = allocate(p);
    if (!plan.ok()) return 1;
    p.domains[0].limit = plan->use.kl[0] - 0.01 * (plan->use.kl[0] - p.domains[0].floor);
    measure((widths + ", storage, read cap, one guard").c_str(), p);
    p.domains[3].limit = 1.05 * plan->use.kl[3];
    p.domains[5].limit = 1.02 * plan->use.kl[5];
    measure((widths + ", storage, read cap, three guards").c_str(), p);
  }
  return 0;
}
