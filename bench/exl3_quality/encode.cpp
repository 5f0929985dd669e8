#include "bench/exl3_quality/encode.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/hash.h"
#include "base/rng.h"
#include "bench/exl3_quality/cache.h"
#include "bench/peer/exllamav3_quantizer.h"
#include "stages/quantize/hessian.h"

namespace espalier::quality {
namespace {

using codec::Exl3Tensor;

std::span<const uint8_t> bytes_of(const std::vector<uint16_t>& v) {
  return {reinterpret_cast<const uint8_t*>(v.data()), v.size() * sizeof(uint16_t)};
}

void digest_tensor(Sha256& digest, const Exl3Tensor& tensor) {
  digest.update(bytes_of(tensor.trellis));
  digest.update(bytes_of(tensor.suh));
  digest.update(bytes_of(tensor.svh));
}

// The arm's bytes for a small uneven matrix with a Hessian: changes when the encoder does.
Result<std::string> fingerprint(const Arm& arm, int k2, ThreadPool& pool) {
  constexpr int64_t kSize = 128, kRows = 192;
  const CounterRng rng(3, "fingerprint");
  const auto gaussian = [&rng](uint64_t i) {
    return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
  };
  std::vector<float> weight(kSize * kSize), x(kRows * kSize);
  std::vector<double> hessian(kSize * kSize);
  for (size_t i = 0; i < weight.size(); ++i) {
    weight[i] =
        static_cast<float>(gaussian(i) * (1 + static_cast<double>(i / kSize % 7)) * (1 + static_cast<double>(i % 5)));
  }
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(gaussian(100000 + i) * (1 + static_cast<double>(i % 3)));
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kSize; ++i) {
      for (int64_t j = 0; j < kSize; ++j) {
        hessian[static_cast<size_t>(i * kSize + j)] +=
            double{x[static_cast<size_t>(r * kSize + i)]} * double{x[static_cast<size_t>(r * kSize + j)]};
      }
    }
  }
  ASSIGN_OR_RETURN(const Exl3Tensor tensor, encode_one(arm, k2, codec::Codebook::kMul1, "fingerprint", weight.data(),
                                                       kSize, kSize, hessian.data(), {}, pool));
  Sha256 digest;
  digest_tensor(digest, tensor);
  return digest.finish_hex();
}

// Bytes of one matrix in a cache file: trellis, suh, svh, true error.
size_t stored_size(const MatrixSpec& spec, int k2) {
  return static_cast<size_t>(codec::trellis_words(spec.in, spec.out, k2) + spec.in + spec.out) * sizeof(uint16_t) +
         sizeof(double);
}

void store(const Exl3Tensor& tensor, double error, uint8_t*& at) {
  for (const std::vector<uint16_t>* part : {&tensor.trellis, &tensor.suh, &tensor.svh}) {
    std::memcpy(at, part->data(), part->size() * sizeof(uint16_t));
    at += part->size() * sizeof(uint16_t);
  }
  std::memcpy(at, &error, sizeof error);
  at += sizeof error;
}

void restore(const MatrixSpec& spec, int k2, const uint8_t*& at, Exl3Tensor& tensor, double& error) {
  tensor.k = spec.in;
  tensor.n = spec.out;
  tensor.k2 = k2;
  tensor.codebook = codec::Codebook::kMul1;
  tensor.trellis.resize(static_cast<size_t>(codec::trellis_words(spec.in, spec.out, k2)));
  tensor.suh.resize(static_cast<size_t>(spec.in));
  tensor.svh.resize(static_cast<size_t>(spec.out));
  for (std::vector<uint16_t>* part : {&tensor.trellis, &tensor.suh, &tensor.svh}) {
    std::memcpy(part->data(), at, part->size() * sizeof(uint16_t));
    at += part->size() * sizeof(uint16_t);
  }
  std::memcpy(&error, at, sizeof error);
  at += sizeof error;
}

ModelFacts facts_of(const Arm& arm, const ExpertMatrix& m) {
  ModelFacts facts{default_damping(m.effective_tokens, m.spec.in), {}};
  if (arm.output_metrics)
    facts.output = {m.output_weights.empty() ? nullptr : m.output_weights.data(), m.residual};
  return facts;
}

Status encode_range(const Arm& arm, int k2, const ExpertSet& experts, size_t first, size_t last, EncodedSet& out,
                    Progress& progress, ThreadPool& pool) {
  std::vector<Status> outcome(last - first);
  pool.parallel_for(static_cast<int64_t>(last - first), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (progress.is_cancelled()) return;
      const ExpertMatrix& m = experts.matrices[first + static_cast<size_t>(i)];
      const double* hessian = arm.all_tokens ? m.all_tokens : m.routed.data();
      Result<Exl3Tensor> tensor = encode_one(arm, k2, codec::Codebook::kMul1, m.spec.stem, m.weight.data(), m.spec.in,
                                             m.spec.out, hessian, facts_of(arm, m), pool);
      if (!tensor.ok()) {
        outcome[static_cast<size_t>(i)] = std::move(tensor).error();
        return;
      }
      std::vector<float> decoded(m.weight.size());
      codec::decode_weight(tensor->view(), decoded.data(), pool);
      out.true_errors[first + static_cast<size_t>(i)] =
          codec::measure_error(m.weight.data(), decoded.data(), m.spec.in, m.spec.out, m.routed.data(), pool)
              .true_error;
      out.tensors[first + static_cast<size_t>(i)] = std::move(tensor).value();
      progress.advance(m.spec.in * m.spec.out, m.spec.stem);
    }
  });
  for (Status& status : outcome) RETURN_IF_ERROR(std::move(status));
  if (progress.is_cancelled()) return cancelled("stopped while encoding; the same command resumes");
  return ok_status();
}

}  // namespace

Result<Arm> arm_from_name(const std::string& name) {
  Arm arm;
  arm.name = name;
  std::string base = name;
  if (const size_t at = name.find('@'); at != std::string::npos) {
    base = name.substr(0, at);
    arm.seed = std::stoull(name.substr(at + 1));
  }
  if (base.ends_with("-plain")) {
    arm.output_metrics = false;
    base.resize(base.size() - 6);
  }
  if (const std::optional<codec::Preset> preset = codec::preset_from_name(base)) {
    arm.kind = Arm::Kind::kOurs;
    arm.preset = *preset;
  } else if (!arm.output_metrics) {
    return invalid_argument("--arms: '" + name + "': only best and fast have a -plain form");
  } else if (base == "peer-own") {
    arm.all_tokens = true;
  } else if (base == "peer-1.5") {
    arm.newer = true;
  } else if (base != "peer") {
    return invalid_argument("--arms: no arm '" + name +
                            "'; there are peer, best, fast, best-plain, fast-plain, peer-own and peer-1.5, each also with @SEED");
  }
  return arm;
}

Result<Exl3Tensor> encode_one(const Arm& arm, int k2, codec::Codebook codebook, const std::string& name,
                              const float* weight, int64_t k, int64_t n, const double* hessian,
                              const ModelFacts& facts, ThreadPool& pool) {
  if (arm.kind == Arm::Kind::kOurs) {
    codec::QuantizeOptions options = codec::quantize_preset(arm.preset);
    options.k2 = k2;
    options.codebook = codebook;
    options.seed = arm.seed;
    options.name = name;
    options.damping = facts.damping.value_or(options.damping);
    options.output = facts.output;
    if (facts.output.diagonal != nullptr || facts.output.full != nullptr)
      options.output_damping = kOutputMetricDamping;
    ASSIGN_OR_RETURN(codec::QuantizedMatrix q, codec::quantize_matrix(weight, k, n, hessian, options, pool));
    return std::move(q.tensor);
  }
  peer::QuantizerRules rules;
  rules.codebook = codebook;
  rules.k2 = k2;
  rules.fixed_argmin = rules.drift = rules.refit = arm.newer;
  peer::Quantizer quantizer(rules);
  return std::move(quantizer.quantize(weight, k, n, hessian, peer::signs_from_seed(arm.seed, name, k, n)).tensor);
}

Result<EncodedSet> encode_experts(const Arm& arm, int k2, const ExpertSet& experts, const std::filesystem::path& work,
                                  Progress& progress, ThreadPool& pool) {
  const size_t n = experts.matrices.size();
  EncodedSet out;
  out.tensors.resize(n);
  out.true_errors.resize(n);
  ASSIGN_OR_RETURN(const std::string encoder, fingerprint(arm, k2, pool));
  int64_t total = 0;
  for (const ExpertMatrix& m : experts.matrices) total += m.spec.in * m.spec.out;
  progress.begin(arm.name + " at " + codec::width_text(k2) + " bits, weights", total);
  const auto start = std::chrono::steady_clock::now();
  size_t first = 0;
  for (int layer = 0; layer < experts.n_layers; ++layer) {
    size_t last = first, size = 0;
    int64_t weights = 0;
    while (last < n && experts.matrices[last].spec.block == layer) {
      size += stored_size(experts.matrices[last].spec, k2);
      weights += experts.matrices[last].spec.in * experts.matrices[last].spec.out;
      ++last;
    }
    const std::string key = experts.identity + " arm " + arm.name + " k2 " + std::to_string(k2) + " layer " +
                            std::to_string(layer) + " encoder " + encoder +
                            (arm.kind == Arm::Kind::kOurs && arm.output_metrics ? " output metrics" : "");
    const auto path = work / ("encoded-" + sha256_hex(key).substr(0, 16) + ".bin");
    std::vector<uint8_t> bytes(size);
    if (read_cache(path, key, bytes)) {
      const uint8_t* at = bytes.data();
      for (size_t i = first; i < last; ++i)
        restore(experts.matrices[i].spec, k2, at, out.tensors[i], out.true_errors[i]);
      progress.advance(weights, "from the work folder");
    } else {
      RETURN_IF_ERROR(encode_range(arm, k2, experts, first, last, out, progress, pool));
      uint8_t* at = bytes.data();
      for (size_t i = first; i < last; ++i) store(out.tensors[i], out.true_errors[i], at);
      RETURN_IF_ERROR(write_cache(path, key, bytes));
      out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    first = last;
  }
  Sha256 digest;
  for (const Exl3Tensor& tensor : out.tensors) digest_tensor(digest, tensor);
  out.digest = digest.finish_hex();
  return out;
}

}  // namespace espalier::quality
