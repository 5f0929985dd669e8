// Encodes the matrices of one block: dense ones from their captured inputs, routed experts one at a time from the
// routing table.
//
// Every native matrix is replaced by its EXL3 form in the block's weights as soon as it is encoded, so that the block
// can carry the calibration rows on as the reader of the pack will. Bytes depend on weights, inputs, options, seed and
// names only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "codec/quantizer.h"
#include "model/forward.h"
#include "model/names.h"
#include "model/weights.h"
#include "stages/quantize/capture.h"

namespace espalier {

enum class W2Input { kQuantized, kNative };

struct EncodeSettings {
  codec::Preset preset =
      codec::Preset::kFast;  // for the records; `codec` holds what it stands for and what overrides it
  // Effort, codebook and seed. Width, name, damping and output metric are set per matrix.
  codec::QuantizeOptions codec = codec::quantize_preset(codec::Preset::kFast);
  std::optional<double> damping;    // absent: default_damping of the tokens that a matrix saw
  bool shared_scales = false;       // w1 and w3 of an expert with one input scale (where their widths are equal)
  double routing_exponent = 2;      // p: a routed token weighs g^p
  std::optional<double> prior_w13;  // n0 in tokens of w1 and w3; absent: d_model / 4
  std::optional<double> prior_w2;   // n0 of w2; absent: d_ff / 4
  int64_t prior_sample = 4096;      // tokens of the layer that every expert runs for w2's prior
  W2Input w2_input = W2Input::kQuantized;
  bool output_metrics = true;  // weigh the outputs of routed experts by what the model makes of them (output_metrics.h)
};

// What is known about one encoded matrix; deterministic.
struct MatrixRecord {
  std::string stem;
  int64_t in = 0;
  int64_t out = 0;
  int k2 = 0;                  // width in half bits
  int64_t tokens = 0;          // rows in the Hessian
  int64_t dropped_tokens = 0;  // non-finite rows
  double effective_tokens = 0;
  double weight_sum = 0;
  double diagonal_mean = 0, diagonal_min = 0,
         diagonal_max = 0;  // of the Hessian used, per unit weight before the prior
  double prior_fraction = 0;
  std::string hessian;    // calibrated, none, empty
  double damping = 0;     // as used in the end
  double true_error = 0;  // tr(E^T H E) / tr(W^T H W)
  double relative_mse = 0;
  double weighted_error = 0;  // with the output metric; equal to true_error without one
  std::vector<codec::Fallback> fallbacks;
  std::string sha256;  // over trellis, suh and svh bytes
};

// Routed tokens of one block.
struct BlockCoverage {
  std::string prefix;                   // "layers.3."
  int64_t tokens = 0;                   // FFN inputs seen
  std::vector<int64_t> expert_tokens;   // per expert
  std::vector<int32_t> without_tokens;  // experts that no token reached
};

// The block's Linear that a spec names; null for root matrices (head, main_proj).
Linear* find_linear(BlockWeights& weights, const MatrixSpec& spec);

// g^(p/2): the factor that a routed row is multiplied with so that its Hessian weight is g^p.
float routing_scale(float weight, double exponent);

// `count` ascending token indices of [0, n), one per equal stretch, drawn from (seed, name); all of them when count >=
// n.
std::vector<int32_t> sample_tokens(int64_t n, int64_t count, uint64_t seed, const std::string& name);

// Adds the rows `tokens` of x, each scaled by `scale` (null: 1), to the accumulator, in the order given.
void add_rows(ThreadPool& pool, const MoeInputs& inputs, const std::vector<int32_t>& tokens, const float* scale,
              HessianAccumulator* accumulator);

// sha256 over the bytes of trellis, suh and svh.
std::string tensor_digest(const codec::Exl3Tensor& tensor);

// Hessian facts of a record.
void describe_hessian(const Hessian& hessian, MatrixRecord* record);

// One matrix to encode: *linear is replaced, and the error fields, fallbacks and digest of *record are filled. Its
// effective_tokens, which describe_hessian fills, decide the damping.
struct EncodeTarget {
  const MatrixSpec& spec;
  int k2 = 0;
  Linear* linear = nullptr;
  MatrixRecord* record = nullptr;
};
// hessian [in, in] or null; output: how much its outputs matter. Errors: those of codec::quantize_matrix.
Status encode_matrix(const EncodeSettings& settings, const EncodeTarget& target, const double* hessian,
                     const codec::OutputMetric& output, ThreadPool& pool);
// The same for matrices of one input and one width that share their input scale, without output metrics.
Status encode_sharing(const EncodeSettings& settings, const std::vector<EncodeTarget>& targets, const double* hessian,
                      ThreadPool& pool);

class WorkFolder;  // work_folder.h

struct BlockJob {
  const CallContext& context;  // observer is ignored
  const EncodeSettings& settings;
  std::vector<MatrixSpec> specs;  // of the block, in order
  std::vector<int> k2;            // width per spec
  std::string prefix;             // "layers.3."
  int64_t n_experts = 0;
  const double* residual_metric = nullptr;  // [D, D] for w2 of the routed experts; null: none
  const WorkFolder* work = nullptr;         // keeps what is encoded and has what an earlier run encoded; null: none
};

// Takes every matrix from the work folder, without inputs: when each unit and the block's coverage are there. False, and nothing
// has changed, when something is missing.
bool take_kept_block(const BlockJob& job, BlockWeights& weights, std::vector<MatrixRecord>* records, BlockCoverage* coverage,
                     Progress& progress);

// Encodes every quantizable matrix of the block. `weights` comes in native and leaves quantized; records are appended
// in spec order. Errors: data_loss when more than 10 % of an input's rows are not finite; cancelled.
Status encode_block(const BlockJob& job, const BlockCapture& capture, BlockWeights& weights,
                    std::vector<MatrixRecord>* records, BlockCoverage* coverage, Progress& progress);

}  // namespace espalier
