// What does every option of the EXL3 quantizer gain or lose?
//
// True error tr(E^T H E) / tr(W^T H W) of each variant, raw Hessian, original basis, stored fp16 scales, divided by
// that of the defaults, geometric mean per group. Groups: the golden linears with a Hessian, each at its own width
// (also divided by exllamav3's recorded error); synthetic 512x512 with log-normal rows/columns/channels of three
// strengths; one routed expert a layer of the pocket model, w1 and w3, and w2. The last four at K = 2, 3 and 4, each
// also with the Hessian of other rows ("held out"), which says whether a gain is fitting the calibration. Damping of
// the experts follows their tokens, as in the stage `quantize`; elsewhere it is 0.025. Seconds are wall time of the
// whole variant, widths and groups together.
//
//   build/release/bench/bench_exl3_ablation > docs/measurements/exl3-ablation-DATE.txt
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "bench/exl3_ablation/samples.h"
#include "bench/exl3_ablation/table.h"
#include "bench/exl3_ablation/variants.h"
#include "codec/quantizer.h"
#include "stages/quantize/hessian.h"

namespace {

using namespace espalier;
using namespace espalier::ablation;

struct Flags {
  std::string model = ESPALIER_SOURCE_DIR "/models/pocket";
  std::vector<std::string> golden = {ESPALIER_GOLDEN_DIR "/exl3", ESPALIER_SHARED_GOLDEN "/exl3"};
  std::vector<std::string> widths = {"2", "3", "4"};
  std::vector<std::string> groups, only, variants;
  int golden_seeds = 1, threads = 0;
  bool list = false;
};

std::string machine_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

bool is_wanted(const std::string& name, const std::vector<std::string>& filters) {
  return filters.empty() || std::any_of(filters.begin(), filters.end(), [&](const std::string& filter) {
           return name.find(filter) != std::string::npos;
         });
}

Result<std::vector<Sample>> make_samples(const Flags& flags, ThreadPool& pool) {
  std::vector<int> k2;
  for (const std::string& width : flags.widths) {
    char* end = nullptr;
    const double bits = std::strtod(width.c_str(), &end);
    if (width.empty() || *end != 0) return invalid_argument("--widths: expected bits a weight, found '" + width + "'");
    ASSIGN_OR_RETURN(const int one, codec::width_from_bits(bits));
    k2.push_back(one);
  }
  std::vector<Sample> samples;
  const auto add = [&](std::vector<Sample> more) { std::move(more.begin(), more.end(), std::back_inserter(samples)); };
  if (is_wanted("golden", flags.groups)) {
    for (const char* file : {"mul1_128.safetensors", "mul1_larger.safetensors", "other_and_special.safetensors"}) {
      for (const std::filesystem::path folder : flags.golden) {
        if (!std::filesystem::exists(folder / file)) continue;
        add(golden_samples(folder / file, flags.golden_seeds, pool));
        break;
      }
    }
  }
  if (is_wanted("512x512", flags.groups)) {
    for (const Spread& shape : {Spread{0.1, 0.1, 0.3, 0}, Spread{0.3, 0.2, 0.5, -0.3}, Spread{0.4, 0.4, 0.7, 0}}) {
      add(synthetic_samples(shape, k2, pool));
    }
  }
  if (is_wanted("pocket", flags.groups)) {
    ASSIGN_OR_RETURN(std::vector<Sample> experts, expert_samples(flags.model, k2, pool));
    add(std::move(experts));
  }
  if (samples.empty()) return invalid_argument("no group has such a name; groups are golden, 512x512 and pocket");
  return samples;
}

codec::QuantizeOptions options_of(const Sample& s, const Variant& variant, int seed) {
  codec::QuantizeOptions options;
  options.k2 = s.k2;
  options.codebook = s.codebook;
  options.seed = static_cast<uint64_t>(seed);
  options.name = s.name;
  if (s.effective_tokens > 0) options.damping = default_damping(s.effective_tokens, s.k);
  variant.change(options);
  return options;
}

// Samples [first, last) read the same inputs.
Status evaluate(const std::vector<Sample>& samples, size_t first, size_t last, const Variant& variant,
                std::vector<Outcome>& outcomes, ThreadPool& pool) {
  if (variant.shares_inputs && last - first < 2) return ok_status();
  const Sample& leader = samples[first];
  for (int seed = 0; seed < leader.n_seeds; ++seed) {
    std::vector<codec::QuantizedMatrix> encoded;
    if (variant.shares_inputs) {
      std::vector<codec::SharedInputMatrix> matrices;
      for (size_t i = first; i < last; ++i)
        matrices.push_back({samples[i].weight.data(), samples[i].n, samples[i].name});
      ASSIGN_OR_RETURN(encoded, codec::quantize_with_shared_inputs(matrices, leader.k, leader.hessian.data(),
                                                                   options_of(leader, variant, seed), pool));
    } else {
      for (size_t i = first; i < last; ++i) {
        const Sample& s = samples[i];
        ASSIGN_OR_RETURN(codec::QuantizedMatrix q, codec::quantize_matrix(s.weight.data(), s.k, s.n, s.hessian.data(),
                                                                          options_of(s, variant, seed), pool));
        encoded.push_back(std::move(q));
      }
    }
    for (size_t i = first; i < last; ++i) {
      const Sample& s = samples[i];
      const codec::QuantizedMatrix& q = encoded[i - first];
      outcomes[i].is_valid = true;
      outcomes[i].fit += q.true_error / s.n_seeds;
      if (s.held_out.empty()) continue;
      std::vector<float> decoded(s.weight.size());
      codec::decode_weight(q.tensor.view(), decoded.data(), pool);
      outcomes[i].held_out +=
          codec::measure_error(s.weight.data(), decoded.data(), s.k, s.n, s.held_out.data(), pool).true_error /
          s.n_seeds;
    }
  }
  return ok_status();
}

Result<VariantResult> run_variant(const std::vector<Sample>& samples, const Variant& variant, ThreadPool& pool) {
  VariantResult result{variant.name, std::vector<Outcome>(samples.size()), 0};
  std::vector<size_t> starts;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (i == 0 || samples[i].inputs.empty() || samples[i].inputs != samples[i - 1].inputs) starts.push_back(i);
  }
  starts.push_back(samples.size());
  const auto start = std::chrono::steady_clock::now();
  std::vector<Status> statuses(starts.size(), ok_status());
  pool.parallel_for(static_cast<int64_t>(starts.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    for (auto g = static_cast<size_t>(begin); g < static_cast<size_t>(end); ++g) {
      statuses[g] = evaluate(samples, starts[g], starts[g + 1], variant, result.outcomes, pool);
    }
  });
  for (Status& status : statuses) RETURN_IF_ERROR(std::move(status));
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

Status run(const Flags& flags) {
  std::vector<Variant> variants;
  for (Variant& variant : standard_variants()) {
    const bool is_base = variants.empty();
    const bool is_chosen = is_wanted(variant.name, flags.only) && flags.variants.empty();
    if (is_base || is_chosen) variants.push_back(std::move(variant));
  }
  for (const std::string& text : flags.variants) {
    ASSIGN_OR_RETURN(Variant variant, parse_variant(text));
    variants.push_back(std::move(variant));
  }
  if (flags.list) {
    for (const Variant& variant : variants) std::printf("%s\n", variant.name.c_str());
    return ok_status();
  }
  ThreadPool pool(flags.threads);
  ASSIGN_OR_RETURN(const std::vector<Sample> samples, make_samples(flags, pool));
  std::vector<VariantResult> results;
  for (const Variant& variant : variants) {
    ASSIGN_OR_RETURN(VariantResult result, run_variant(samples, variant, pool));
    std::fprintf(stderr, "%zu/%zu  %s: %.1f s\n", results.size() + 1, variants.size(), variant.name.c_str(),
                 result.seconds);
    results.push_back(std::move(result));
  }
  std::printf("%s, %s tier, %d threads; %zu matrices, sign seeds of a golden case: %d\n", machine_name().c_str(),
              std::string(simd_tier_name(best_simd_tier())).c_str(), pool.n_threads(), samples.size(),
              flags.golden_seeds);
  std::printf(
      "True error relative to the defaults, geometric mean; golden cases also relative to exllamav3's recorded "
      "error.\n");
  std::printf("\nall widths\n%s", table_text(samples, results, 0).c_str());
  std::vector<int> widths;
  for (const Sample& s : samples) {
    if (std::find(widths.begin(), widths.end(), s.k2) == widths.end()) widths.push_back(s.k2);
  }
  std::sort(widths.begin(), widths.end());
  for (int k2 : widths) {
    std::printf("\nK = %s\n%s", codec::width_text(k2).c_str(), table_text(samples, results, k2).c_str());
  }
  return ok_status();
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app{"What every option of the EXL3 quantizer gains or loses: true error relative to the defaults"};
  app.add_option("--model", flags.model, "Native model folder with data/calibration.jsonl");
  app.add_option("--golden", flags.golden, "Folders of golden EXL3 files");
  app.add_option("--widths", flags.widths, "Bits a weight of the synthetic matrices and the experts")->delimiter(',');
  app.add_option("--groups", flags.groups, "Only groups whose name contains one of these: golden, 512x512, pocket")
      ->delimiter(',');
  app.add_option("--only", flags.only, "Only variants whose name contains one of these")->delimiter(',');
  app.add_option("--variant", flags.variants,
                 "Instead of the standard list: options such as damping=0.1,descent=2 (may be repeated)");
  app.add_option("--golden-seeds", flags.golden_seeds, "Sign seeds of the golden cases")->check(CLI::Range(1, 100));
  app.add_option("--threads", flags.threads, "0 = all usable CPUs")->check(CLI::NonNegativeNumber);
  app.add_flag("--list", flags.list, "Print the variants' names and stop");
  CLI11_PARSE(app, argc, argv);
  const Status status = run(flags);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_exl3_ablation: error: %s\n", std::string(status.message()).c_str());
    return status.code() == StatusCode::kInvalidArgument ? 2 : 1;
  }
  return 0;
}
