// How fast is the forward pass on this CPU? Prefill and decode of one sequence, per SIMD tier.
// Usage: bench_forward_speed [MODEL] [TOKENS]; the default model is the golden tiny checkpoint (hidden 256, 8 layers),
// from the source folder. Method: random ids, one warm-up, best of 3; prefill in calls of 256 with logits of the last
// row; decode of 32 tokens after it.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/rng.h"
#include "base/simd_tier.h"
#include "model/forward.h"

namespace espalier {
namespace {

double seconds(const std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

int run(const std::string& dir, int64_t n_tokens) {
  ThreadPool pool;
  const auto start = std::chrono::steady_clock::now();
  const auto loaded = Model::load(dir, {}, pool);
  if (!loaded.ok()) {
    std::fprintf(stderr, "%s\n", loaded.error().message().c_str());
    return 1;
  }
  const Model& model = **loaded;
  std::printf("%s, %d threads; model %s loaded in %.2f s\n", cpu_name().c_str(), pool.n_threads(), dir.c_str(),
              seconds(start));
  std::vector<int32_t> ids(static_cast<size_t>(n_tokens));
  const CounterRng rng(1, "bench");
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(3 + rng.bits(i) % 200);
  for (SimdTier tier : usable_simd_tiers()) {
    if (tier == SimdTier::kBaseline && n_tokens > 512) continue;  // emulated FMA, slow
    set_simd_tier(tier);
    double prefill = 1e30, decode = 1e30;
    for (int round = 0; round < 4; ++round) {
      SequenceState state(model.config());
      auto t0 = std::chrono::steady_clock::now();
      if (!forward(model, state, ids, {}, pool).ok()) return 1;
      const double p = seconds(t0);
      t0 = std::chrono::steady_clock::now();
      for (int i = 0; i < 32; ++i) {
        if (!forward(model, state, {ids.data() + i, 1}, {}, pool).ok()) return 1;
      }
      if (round == 0) continue;
      prefill = std::min(prefill, p);
      decode = std::min(decode, seconds(t0) / 32);
    }
    std::printf("%-9s prefill %8.0f tokens/s   decode %7.0f tokens/s\n", std::string(simd_tier_name(tier)).c_str(),
                static_cast<double>(n_tokens) / prefill, 1.0 / decode);
  }
  return 0;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  const std::string dir = argc > 1 ? argv[1] : "tests/golden/model/tiny-a";
  return espalier::run(dir, argc > 2 ? std::stoll(argv[2]) : 1024);
}
