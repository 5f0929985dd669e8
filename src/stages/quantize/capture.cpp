#include "stages/quantize/capture.h"

#include "base/check.h"

namespace espalier {

std::vector<ExpertTokens> tokens_by_expert(const MoeInputs& inputs, int64_t n_experts) {
  std::vector<ExpertTokens> out(static_cast<size_t>(n_experts));
  const int64_t n = inputs.n_tokens();
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t i = t * inputs.n_active; i < (t + 1) * inputs.n_active; ++i) {
      ExpertTokens& expert = out.at(static_cast<size_t>(inputs.ids[static_cast<size_t>(i)]));
      expert.tokens.push_back(static_cast<int32_t>(t));
      expert.weights.push_back(inputs.weights[static_cast<size_t>(i)]);
    }
  }
  return out;
}

std::string input_name(const MatrixSpec& spec, bool is_drafter) {
  switch (spec.kind) {
    case MatrixKind::kWqA:
    case MatrixKind::kCompressorWkv:
    case MatrixKind::kCompressorWgate:
      return "attention input";
    case MatrixKind::kWkv:
      return is_drafter ? "attention input and taps" : "attention input";
    case MatrixKind::kWqB:
    case MatrixKind::kIndexerWqB:
      return "query latent";
    case MatrixKind::kWoA:
      return "heads of group " + std::to_string(spec.group);
    case MatrixKind::kWoB:
      return "output latent";
    case MatrixKind::kIndexerWk:
      return "compressed latent";
    case MatrixKind::kExpertW1:
    case MatrixKind::kExpertW3:
      return "routed input of expert " + std::to_string(spec.expert);
    case MatrixKind::kExpertW2:
      return "hidden of expert " + std::to_string(spec.expert);
    case MatrixKind::kSharedW1:
    case MatrixKind::kSharedW3:
      return "ffn input";
    case MatrixKind::kSharedW2:
      return "shared hidden";
    case MatrixKind::kEngramWkv:
      return "engram rows";
    case MatrixKind::kHead:
      return "final hidden";
    case MatrixKind::kMainProj:
      return "taps";
  }
  return "";
}

namespace {

bool is_routed(MatrixKind kind) {
  return kind == MatrixKind::kExpertW1 || kind == MatrixKind::kExpertW2 || kind == MatrixKind::kExpertW3;
}

}  // namespace

BlockCapture::BlockCapture(const std::vector<MatrixSpec>& specs, bool is_drafter, ThreadPool& pool)
    : is_drafter_(is_drafter), pool_(pool) {
  for (const MatrixSpec& spec : specs) {
    // The shared expert's input is always taken: it is the prior of the routed ones.
    if (is_routed(spec.kind) || (!spec.is_quantizable && spec.kind != MatrixKind::kSharedW1)) continue;
    const std::string name = input_name(spec, is_drafter);
    if (inputs_.count(name) != 0) continue;
    inputs_[name].accumulator = std::make_unique<HessianAccumulator>(spec.in);
    inputs_[name].hessian.k = spec.in;
    leaders_[spec.stem] = name;
  }
}

void BlockCapture::linear_input(std::string_view stem, const float* x, int64_t n_rows, int64_t in) {
  const auto leader = leaders_.find(stem);
  if (leader == leaders_.end()) return;
  Input& input = inputs_.at(leader->second);
  CHECK(input.accumulator != nullptr && input.hessian.k == in)
      << "input of " << std::string(stem) << " after finish or of another width";
  input.accumulator->add(pool_, x, n_rows);
}

void BlockCapture::moe_input(std::string_view block_prefix, const float* x, int64_t n_rows, int64_t d_model,
                             const int32_t* ids, const float* weights, int64_t n_active) {
  (void)block_prefix;
  moe_.d_model = d_model;
  moe_.n_active = n_active;
  moe_.x.insert(moe_.x.end(), x, x + n_rows * d_model);
  moe_.ids.insert(moe_.ids.end(), ids, ids + n_rows * n_active);
  moe_.weights.insert(moe_.weights.end(), weights, weights + n_rows * n_active);
}

void BlockCapture::finish() {
  for (auto& [name, input] : inputs_) {
    if (input.accumulator == nullptr) continue;
    input.hessian = input.accumulator->finish(pool_);
    input.accumulator.reset();
  }
}

const Hessian* BlockCapture::hessian_of(const MatrixSpec& spec) const {
  const auto it = inputs_.find(input_name(spec, is_drafter_));
  return it == inputs_.end() || it->second.hessian.rows == 0 ? nullptr : &it->second.hessian;
}

const Hessian* BlockCapture::ffn_input() const {
  const auto it = inputs_.find("ffn input");
  return it == inputs_.end() || it->second.hessian.rows == 0 ? nullptr : &it->second.hessian;
}

}  // namespace espalier
