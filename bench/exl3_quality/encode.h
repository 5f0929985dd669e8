// One arm of the comparison at one width: encodes every expert matrix, measures its true error, and keeps the result in
// the work folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "bench/exl3_quality/capture.h"
#include "codec/exl3_tensor.h"
#include "codec/quantizer.h"

namespace espalier::quality {

struct Arm {
  enum class Kind : uint8_t { kPeer, kOurs };
  std::string name;  // see arm_from_name
  Kind kind = Kind::kPeer;
  codec::Preset preset = codec::Preset::kBest;  // ours
  bool output_metrics = true;                   // ours: as `quantize` does; false: every output counts the same
  bool all_tokens = false;                      // peer: calibrated on all tokens, as exllamav3 does by itself
  bool newer = false;                           // peer: with what its 1.5 line adds
  uint64_t seed = 0;
};
// "peer", "best", "fast", "peer-own", "peer-1.5", "best-plain" and "fast-plain" (without output metrics), each with
// "@N" for sign seed N. Errors: invalid_argument naming the arm.
Result<Arm> arm_from_name(const std::string& name);

// What `espalier quantize` adds to a preset for one matrix; ours only.
struct ModelFacts {
  std::optional<double> damping;  // absent: the preset's
  codec::OutputMetric output;
};

// One matrix; deterministic. Errors: those of codec::quantize_matrix.
Result<codec::Exl3Tensor> encode_one(const Arm& arm, int k2, codec::Codebook codebook, const std::string& name,
                                     const float* weight, int64_t k, int64_t n, const double* hessian,
                                     const ModelFacts& facts, ThreadPool& pool);

struct EncodedSet {
  std::vector<codec::Exl3Tensor> tensors;  // in the order of ExpertSet::matrices
  std::vector<double> true_errors;         // with the routed Hessian, whatever the arm was calibrated on
  std::string digest;                      // of all bytes
  double seconds = 0;                      // 0 when everything came from the work folder
};

// Layer by layer, so that an interrupted run resumes at the next layer. What the encoder does enters the cache's key
// through its bytes for a small fixed matrix, so a changed encoder does not meet old results.
Result<EncodedSet> encode_experts(const Arm& arm, int k2, const ExpertSet& experts, const std::filesystem::path& work,
                                  Progress& progress, ThreadPool& pool);

}  // namespace espalier::quality
