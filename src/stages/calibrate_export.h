// One layer's calibration inputs and Hessians as a safetensors file, for checks by programs that are not ours.
//
// `x` F32 [tokens, D], `ids` I32 and `weights` F32 [tokens, n_active]: FFN inputs and routing; `input.<stem>` F32 and
// `hessian.<stem>` F64: what a dense matrix reads, and its Hessian, by the first matrix that reads it; for expert E
// `hessian.experts.E.w1` F64 [D, D], `hidden.experts.E` F32 [routed tokens, d_ff] (tokens ascending) and
// `hessian.experts.E.w2` F64 [d_ff, d_ff], weighted by g^p. Memory: everything of the layer at once; for small sets.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/forward.h"
#include "stages/quantize/capture.h"

namespace espalier {

// Passes everything to a BlockCapture and keeps the dense inputs too.
class ExportCapture : public LayerObserver {
 public:
  ExportCapture(const std::vector<MatrixSpec>& specs, ThreadPool& pool) : specs_(specs), capture_(specs, false, pool) {}

  void linear_input(std::string_view stem, const float* x, int64_t n_rows, int64_t in) override;
  void moe_input(std::string_view block_prefix, const float* x, int64_t n_rows, int64_t d_model, const int32_t* ids,
                 const float* weights, int64_t n_active) override;

  // Ends the capture; `weights` are the layer's own.
  Status write(const std::filesystem::path& path, const CallContext& context, const BlockWeights& weights,
               double routing_exponent);

  const MoeInputs& moe() const { return capture_.moe(); }

 private:
  std::vector<MatrixSpec> specs_;
  BlockCapture capture_;
  std::map<std::string, std::vector<float>> dense_;  // by stem
};

}  // namespace espalier
