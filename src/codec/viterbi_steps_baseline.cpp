// SSE4 on x86, NEON on ARM; elsewhere the baseline is the reference.
// Neither is in the flags of this file, and Highway would take a lesser target without them.
#define HWY_DISABLE_PCLMUL_AES
#define HWY_DISABLE_BMI2_FMA
// ARM without run-time choice: with it Highway's functions are compiled for +crypto and cannot be inlined into ours.
#define TOOLCHAIN_MISS_SYS_AUXV_H
#include <hwy/highway.h>

#if HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_NEON
#include "codec/viterbi_lanes.h"

namespace espalier::codec {

const StepKernels& step_kernels_baseline() {
  static const StepKernels kernels = make_step_kernels<IntegerLanes, FloatLanes>();
  return kernels;
}

}  // namespace espalier::codec
#else
#include "codec/viterbi_steps.h"

namespace espalier::codec {

const StepKernels& step_kernels_baseline() { return step_kernels_reference(); }

}  // namespace espalier::codec
#endif
