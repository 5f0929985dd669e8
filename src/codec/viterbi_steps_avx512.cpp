// Neither is in the flags of this file, and Highway would take a lesser target without them.
#define HWY_DISABLE_PCLMUL_AES
#define HWY_DISABLE_BMI2_FMA
#include <hwy/highway.h>

static_assert(HWY_TARGET == HWY_AVX3);

#include "codec/viterbi_lanes.h"

namespace espalier::codec {

const StepKernels& step_kernels_avx512() {
  static const StepKernels kernels = make_step_kernels<IntegerLanes, FloatLanes>();
  return kernels;
}

}  // namespace espalier::codec
