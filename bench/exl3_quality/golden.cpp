#include "bench/exl3_quality/golden.h"

#include <cmath>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "bench/exl3_quality/encode.h"
#include "bench/peer/exllamav3_quantizer.h"
#include "format/safetensors.h"
#include "tensor/float_formats.h"

namespace espalier::quality {
namespace {

struct Case {
  GoldenResult result;
  std::vector<float> weight, decoded;
  std::vector<double> hessian;
  codec::Exl3Tensor stored;
};

Result<std::vector<float>> floats(const SafetensorsFile& file, const std::string& name) {
  ASSIGN_OR_RETURN(const ConstView view, file.get(name));
  std::vector<float> out(static_cast<size_t>(view.size()));
  if (view.dtype == DType::kF32) {
    std::memcpy(out.data(), view.data, out.size() * sizeof(float));
  } else if (view.dtype == DType::kF16) {
    std::vector<uint16_t> bits(out.size());
    std::memcpy(bits.data(), view.data, bits.size() * sizeof(uint16_t));
    for (size_t i = 0; i < bits.size(); ++i) out[i] = decode_f16(bits[i]);
  } else {
    return data_loss("golden tensor '" + name + "': expected F16 or F32");
  }
  return out;
}

std::vector<double> mean_square(const std::vector<float>& x, int64_t k) {
  const int64_t rows = static_cast<int64_t>(x.size()) / k;
  std::vector<double> h(static_cast<size_t>(k * k));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      const double xi = double{x[static_cast<size_t>(r * k + i)]} / static_cast<double>(rows);
      for (int64_t j = 0; j < k; ++j)
        h[static_cast<size_t>(i * k + j)] += xi * double{x[static_cast<size_t>(r * k + j)]};
    }
  }
  return h;
}

Status add_cases(const SafetensorsFile& file, std::vector<Case>& cases) {
  const codec::TensorLookup lookup = [&file](const std::string& name) -> std::optional<ConstView> {
    const TensorEntry* entry = file.find(name);
    return entry == nullptr ? std::nullopt : std::optional<ConstView>(file.view(*entry));
  };
  for (const TensorEntry& entry : file.entries()) {
    constexpr std::string_view kTail = ".trellis";
    if (!entry.name.ends_with(kTail)) continue;
    const std::string name = entry.name.substr(0, entry.name.size() - kTail.size());
    const std::string source = name == "mul1_256x384_k3" ? "mul1_256x384_k2" : name;  // stored once
    if (file.find(source + ".weight") == nullptr) continue;
    const bool has_h = file.find(source + ".H") != nullptr;
    if (!has_h && file.find(source + ".calib_x") == nullptr) continue;
    Case c;
    ASSIGN_OR_RETURN(c.stored, codec::load_exl3(name, codec::find_exl3_parts(lookup, name)));
    ASSIGN_OR_RETURN(c.weight, floats(file, source + ".weight"));
    ASSIGN_OR_RETURN(c.decoded, floats(file, name + ".dec"));
    ASSIGN_OR_RETURN(const std::vector<float> h, floats(file, source + (has_h ? ".H" : ".calib_x")));
    c.hessian = has_h ? std::vector<double>(h.begin(), h.end()) : mean_square(h, c.stored.k);
    c.result.name = name;
    c.result.k = c.stored.k;
    c.result.n = c.stored.n;
    c.result.k2 = c.stored.k2;
    c.result.codebook = c.stored.codebook;
    cases.push_back(std::move(c));
  }
  return ok_status();
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
                                  c.stored.n, c.hessian.data(), pool));
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
      RETURN_IF_ERROR(add_cases(file, cases));
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
