// Noise in weight space made from the error that encoding left: native + amplitude * noise, for the noise estimator.
//
// kShaped turns the sign of each output's error column at random: e_j' H e_j of every output stays what the encoder left, so the
// noise has the shape of its error (LDLQ's) and only its mean over draws is gone. kWhite draws every column anew with the same
// norm, whatever the inputs are: the cheap estimate that overstates matrices with uneven inputs. Source: quality.md 2.3.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "model/weights.h"

namespace espalier {

enum class NoiseShape { kShaped, kWhite };

struct WeightNoise {
  NoiseShape shape = NoiseShape::kShaped;
  double amplitude = 1;  // 0: the native weights, bit for bit
  int draw = 1;          // draws d and -d are each other's opposite
  uint64_t seed = 0;
  bool operator==(const WeightNoise&) const = default;
};

// native, pack: the experts of `layer`, of equal shapes. An expert that the pack keeps native stays so exactly. Values depend on
// (seed, draw, layer, expert, matrix, position) only. Memory: the layer's experts once more, unpacked.
std::vector<ExpertWeights> noisy_experts(const std::vector<ExpertWeights>& native, const std::vector<ExpertWeights>& pack,
                                         const WeightNoise& noise, int layer, ThreadPool& pool);

}  // namespace espalier
