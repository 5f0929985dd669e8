// A network of the released widths with random weights, made on the device: a few layers that cover every kind of layer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/cuda/network.h"

namespace espalier::bench {

enum class Form { kExl3, kNative };  // native: FP8 dense matrices and MXFP4 experts

struct SyntheticOptions {
  Form form = Form::kExl3;
  std::vector<int> expert_k2s = {6};  // twice the bits a weight; drawn per matrix
  int dense_k2 = 6;
  Products products = Products::kExact;
};

struct SyntheticNetwork {
  std::shared_ptr<const cuda::DeviceModel> model;
  std::vector<std::string> kinds;           // of every layer, for tables
  std::vector<double> dense_bytes;          // of every layer: everything that one token reads but experts
  std::vector<double> expert_bytes;         // of one expert, on average
  double head_bytes = 0;
};

// Errors: resource_exhausted when the device is too small.
Result<SyntheticNetwork> make_network(const SyntheticOptions& options);

}  // namespace espalier::bench
