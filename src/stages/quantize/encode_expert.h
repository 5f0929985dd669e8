// One routed expert: its Hessians from the tokens routed to it, its three matrices encoded together.
//
// Everything the bytes depend on is in ExpertsJob, the expert's own weights and its number, so that another process that is
// given the same rows makes the same bytes. Internal to the stage. Source: quality specification 1.4, 1.5.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "stages/quantize/encode.h"

namespace espalier {

// Everything that the experts of a block share.
struct ExpertsJob {
  const BlockJob& job;
  const MoeInputs& inputs;
  std::vector<ExpertTokens> routed;
  HessianPrior prior_w13;
  double n0_w13 = 0;
  double n0_w2 = 0;
  std::vector<int32_t> sample;  // tokens for w2's prior
};

// Spec indices of one expert; -1: not in the job. Its three matrices have the same two dimensions, so all or none are
// quantizable.
struct ExpertSpecs {
  int w1 = -1, w3 = -1, w2 = -1;
};

// Encodes w1, w3 and w2 of expert `e` in place and fills their records (indices of `at`). Errors: as encode_block. Threads: the
// job's pool.
Status encode_expert(const ExpertsJob& experts, const ExpertSpecs& at, int e, ExpertWeights& expert,
                     std::vector<MatrixRecord>& records);

// Refuses an input with more than 10 % of its rows non-finite. Errors: data_loss naming `stem`.
Status check_dropped(const Hessian& hessian, const std::string& stem);

}  // namespace espalier
