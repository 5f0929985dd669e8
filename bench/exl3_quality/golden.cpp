#include "bench/exl3_quality/golden.h"

#include <cmath>

#include "bench/exl3_quality/encode.h"
#include "bench/peer/exllamav3_quantizer.h"
#include "bench/peer/golden_cases.h"

namespace espalier::quality {
namespace {

struct Case {
  GoldenResult result;
  std::vector<float> weight, decoded;
  std::vector<double> hessian;
  codec::Exl3Tensor stored;
};

void add_cases(const SafetensorsFile& file, std::vector<Case>& cases) {
  for (codec::golden::Case& from : codec::golden::cases(file)) {
    if (from.hessian.empty()) continue;
    Case c;
    c.stored = codec::golden::load(file, from.name);
    c.weight = std::move(from.weight);
    c.decoded = std::move(from.decoded);
    c.hessian = std::move(from.hessian);
    c.result.name = from.name;
    c.result.k = from.k;
    c.result.n = from.n;
    c.result.k2 = from.k2;
    c.result.codebook = from.codebook;
    cases.push_back(std::move(c));
  }
}

double error_of(const Case& c, const std::vector<float>& decoded, ThreadPool& pool) {
  return codec::measure_error(c.weight.data(), decoded.data(), c.stored.k, c.stored.n, c.hessian.data(), pool)
      .true_error;
}

double error_of(const Case& c, const codec::Exl3Tensor& tensor, ThreadPool& pool) {
  std::vector<float> decoded(c.weight.size());
  codec::decode_weight(tensor.view(), decoded.data(), pool);
  return error_of(c, decoded, pool);
}

// v1.4.1 ran the golden cases with automatic output scales, two of them with a forced choice.
double restated_error(const Case& c, ThreadPool& pool) {
  peer::QuantizerRules rules;
  rules.codebook = c.stored.codebook;
  rules.k2 = c.stored.k2;
  rules.out_scales = c.result.name.starts_with("special_outscales")     ? peer::OutScales::kAlways
                     : c.result.name.starts_with("special_nooutscales") ? peer::OutScales::kNever
                                                                        : peer::OutScales::kAuto;
  peer::Quantizer quantizer(rules);
  return error_of(
      c, quantizer.quantize(c.weight.data(), c.stored.k, c.stored.n, c.hessian.data(), peer::signs_of(c.stored)).tensor,
      pool);
}

Status run_case(Case& c, int n_seeds, ThreadPool& pool) {
  c.result.recorded = error_of(c, c.decoded, pool);
  c.result.restated = restated_error(c, pool);
  for (const codec::Preset preset : {codec::Preset::kFast, codec::Preset::kBest}) {
    Arm arm;
    arm.kind = Arm::Kind::kOurs;
    arm.preset = preset;
    double log_sum = 0;
    for (int seed = 0; seed < n_seeds; ++seed) {
      arm.seed = static_cast<uint64_t>(seed);
      ASSIGN_OR_RETURN(const codec::Exl3Tensor tensor,
                       encode_one(arm, c.stored.k2, c.stored.codebook, c.result.name, c.weight.data(), c.stored.k,
                                  c.stored.n, c.hessian.data(), {}, pool));
      log_sum += std::log(error_of(c, tensor, pool));
    }
    (preset == codec::Preset::kFast ? c.result.fast : c.result.best) = std::exp(log_sum / n_seeds);
  }
  return ok_status();
}

}  // namespace

Result<std::vector<GoldenResult>> run_golden(const std::vector<std::filesystem::path>& dirs, int n_seeds,
                                             Progress& progress, ThreadPool& pool) {
  std::vector<Case> cases;
  for (const char* name : {"mul1_128.safetensors", "mul1_larger.safetensors", "other_and_special.safetensors"}) {
    for (const std::filesystem::path& dir : dirs) {
      if (!std::filesystem::exists(dir / name)) continue;
      ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(dir / name));
      add_cases(file, cases);
      break;
    }
  }
  progress.begin("golden cases", static_cast<int64_t>(cases.size()));
  std::vector<Status> outcome(cases.size());
  pool.parallel_for(static_cast<int64_t>(cases.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (progress.is_cancelled()) return;
      outcome[static_cast<size_t>(i)] = run_case(cases[static_cast<size_t>(i)], n_seeds, pool);
      progress.advance(1, cases[static_cast<size_t>(i)].result.name);
    }
  });
  for (Status& status : outcome) RETURN_IF_ERROR(std::move(status));
  if (progress.is_cancelled()) return cancelled("stopped in the golden cases");
  std::vector<GoldenResult> out;
  for (Case& c : cases) out.push_back(std::move(c.result));
  return out;
}

}  // namespace espalier::quality
