// A group between its preparation and its search. Internal to the quantizer on a GPU.
#pragma once

#include <chrono>
#include <map>
#include <vector>

#include "codec/cuda/quantizer.h"
#include "codec/cuda/viterbi.h"
#include "codec/weight_scales.h"
#include "device/buffer.h"

namespace espalier::codec {

// A Hessian, symmetric and with mean diagonal 1, here and on the device; the identity when there is none.
struct UsedHessian {
  HessianUse use = HessianUse::kNone;
  std::vector<double> diagonal;  // undamped
  device::DeviceArray<double> values;
};

// One member on its way. What preparation fills in stands first.
struct GroupWork {
  std::string name;
  WeightScales scales;
  UsedHessian* hessian = nullptr;
  device::DeviceArray<float> weight;
  device::DeviceArray<double> signed_su, su, sv, output_feedback;
  device::DeviceArray<double> rotated, error, feedback, corrected;
  device::DeviceArray<uint16_t> trellis;
};

struct GroupState {
  int64_t k = 0, n = 0;
  QuantizeOptions options;
  std::map<const double*, UsedHessian> hessians;
  std::vector<GroupWork> work;
  std::vector<QuantizedMatrix> results;  // all but trellis and errors
  DeviceSearch search;
};

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace espalier::codec
