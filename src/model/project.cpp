#include "model/project.h"

#include "ops/fake_quant.h"
#include "ops/rms_norm.h"

namespace espalier {

void project(const CallContext& context, const Linear& linear, const std::string& stem, const float* x, int64_t n_rows,
             Rounding rounding, float* y) {
  if (context.observer != nullptr && !stem.empty() && n_rows > 0) {
    context.observer->linear_input(stem, x, n_rows, linear.in());
  }
  if (context.numerics == Numerics::kVendor && rounding == Rounding::kActQuant) {
    std::vector<float> quantised(x, x + n_rows * linear.in());
    ops::fake_quant(context.pool, {quantised.data(), n_rows, linear.in(), ops::FakeQuantFormat::kAct});
    linear.apply(context.pool, quantised.data(), n_rows, y);
  } else {
    linear.apply(context.pool, x, n_rows, y);
  }
  if (rounding != Rounding::kNone) round_if_vendor(context, y, n_rows * linear.out());
}

std::vector<float> project(const CallContext& context, const Linear& linear, const std::string& stem, const float* x,
                           int64_t n_rows, Rounding rounding) {
  std::vector<float> y(static_cast<size_t>(n_rows * linear.out()));
  project(context, linear, stem, x, n_rows, rounding, y.data());
  return y;
}

void normalise(const CallContext& context, const float* x, const std::vector<float>& weight, int64_t n_rows, float* y) {
  const int64_t d = static_cast<int64_t>(weight.size());
  ops::rms_norm(context.pool, {x, weight.data(), y, n_rows, d, context.config.rms_norm_eps});
  round_if_vendor(context, y, n_rows * d);
}

void round_if_vendor(const CallContext& context, float* x, int64_t n) {
  if (context.numerics == Numerics::kVendor) ops::round_to_bf16(context.pool, x, n);
}

}  // namespace espalier
