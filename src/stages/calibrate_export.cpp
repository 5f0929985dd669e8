#include "stages/calibrate_export.h"

#include "format/safetensors.h"
#include "model/moe.h"
#include "stages/quantize/encode.h"

namespace espalier {

void ExportCapture::linear_input(std::string_view stem, const float* x, int64_t n_rows, int64_t in) {
  capture_.linear_input(stem, x, n_rows, in);
  for (const MatrixSpec& spec : specs_) {
    if (spec.stem != stem || spec.expert >= 0) continue;
    std::vector<float>& kept = dense_[spec.stem];
    kept.insert(kept.end(), x, x + n_rows * in);
  }
}

void ExportCapture::moe_input(std::string_view block_prefix, const float* x, int64_t n_rows, int64_t d_model,
                              const int32_t* ids, const float* weights, int64_t n_active) {
  capture_.moe_input(block_prefix, x, n_rows, d_model, ids, weights, n_active);
}

Status ExportCapture::write(const std::filesystem::path& path, const CallContext& context, const BlockWeights& weights,
                            double routing_exponent) {
  capture_.finish();
  const MoeInputs& moe = capture_.moe();
  std::vector<NamedView> eight, four;
  for (const MatrixSpec& spec : specs_) {
    const auto input = dense_.find(spec.stem);
    if (input == dense_.end()) continue;
    const auto rows = static_cast<int64_t>(input->second.size()) / spec.in;
    four.push_back({"input." + spec.stem, {input->second.data(), DType::kF32, {rows, spec.in}}});
    if (const Hessian* h = capture_.hessian_of(spec))
      eight.push_back({"hessian." + spec.stem, {h->sum.data(), DType::kF64, {h->k, h->k}}});
  }
  four.push_back({"x", {moe.x.data(), DType::kF32, {moe.n_tokens(), moe.d_model}}});
  four.push_back({"ids", {moe.ids.data(), DType::kI32, {moe.n_tokens(), moe.n_active}}});
  four.push_back({"weights", {moe.weights.data(), DType::kF32, {moe.n_tokens(), moe.n_active}}});

  const auto n_experts = static_cast<int64_t>(weights.moe.experts.size());
  const std::vector<ExpertTokens> routed = tokens_by_expert(moe, n_experts);
  std::vector<std::vector<float>> hidden(routed.size());
  std::vector<Hessian> first(routed.size()), second(routed.size());
  CallContext quiet = context;
  quiet.observer = nullptr;
  for (size_t e = 0; e < routed.size(); ++e) {
    const auto n = static_cast<int64_t>(routed[e].tokens.size());
    if (n == 0) continue;
    std::vector<float> scale;
    for (float g : routed[e].weights) scale.push_back(routing_scale(g, routing_exponent));
    HessianAccumulator outer(moe.d_model);
    add_rows(context.pool, moe, routed[e].tokens, scale.data(), &outer);
    first[e] = outer.finish(context.pool);
    const ExpertWeights& expert = weights.moe.experts[e];
    std::vector<float> x;
    for (int32_t t : routed[e].tokens)
      x.insert(x.end(), moe.x.begin() + t * moe.d_model, moe.x.begin() + (t + 1) * moe.d_model);
    hidden[e].resize(static_cast<size_t>(n * expert.w2.in()));
    expert_hidden(quiet, expert, x.data(), n, nullptr, hidden[e].data());
    HessianAccumulator inner(expert.w2.in());
    inner.add(context.pool, hidden[e].data(), n, scale.data());
    second[e] = inner.finish(context.pool);
    const std::string name = "experts." + std::to_string(e);
    eight.push_back({"hessian." + name + ".w1", {first[e].sum.data(), DType::kF64, {first[e].k, first[e].k}}});
    eight.push_back({"hessian." + name + ".w2", {second[e].sum.data(), DType::kF64, {second[e].k, second[e].k}}});
    four.push_back({"hidden." + name, {hidden[e].data(), DType::kF32, {n, second[e].k}}});
  }
  eight.insert(eight.end(), four.begin(), four.end());
  return write_safetensors(path, eight, {{"schema", "espalier-layer-export-1"}});
}

}  // namespace espalier
