// The plan of one call: which experts, which rows, and where every warp's stretch of packed memory begins. Made on the device by one
// small launch, read by the others.
//
// A job is a matrix with up to four rows. Jobs lie end to end on a line whose unit is cost (32 rows x 64 columns, weighted by what
// a width costs); warp w takes [w * quota, (w + 1) * quota). Who adds to a column group follows from that by arithmetic, so nothing
// about the cuts is stored but where each warp starts.
#pragma once

#include <cstdint>

#include "codec/cuda/experts.h"
#include "codec/cuda/lanes.cuh"

namespace espalier::codec::cuda {

inline constexpr int kMinPairs = 8;  // a warp's share at least: bounds the parts that a column group can have

// Issue time of a pair by width, measured, arbitrary units. Balance only: results do not depend on it.
__device__ __forceinline__ int pair_cost(int k2) {
  switch (k2) {
    case 2: return 62;
    case 4: return 61;
    case 6: return 66;
    case 8: return 62;
    case 10: return 70;
    default: return 72;
  }
}

struct Entry {
  int expert, n_rows;
  int slots[kSetRows];
  const uint16_t *gate_svh, *up_svh, *down_suh, *down_svh;
};

struct Job {
  const uint32_t* blocks;
  int k2, cost;
  int start;  // on the line
  int n_rows;
  int slots[kSetRows];  // the entry's
};

// What a warp needs to begin: its part of its first job, and the column groups (numbered through all jobs) that it will add to.
struct alignas(16) Start {
  const uint32_t* blocks;        // of the job's matrix
  int job;                       // < 0: nothing to do
  int begin, end;                // pairs of this job
  int k2, n_rows;
  int slots[kSetRows];
  int first, last;               // column groups
  int first_pairs, last_pairs;   // of the first and the last; the inner ones wholly
};

template <int kMaxJobs>
struct Line {
  int n_jobs, quota;
  Job jobs[kMaxJobs];
};

struct ExpertsPlan {
  Entry entries[kMaxSlots];
  const uint16_t* slot_suh[kMaxSlots][2];  // gate's and up's
  Line<2 * kMaxSlots> up;  // job 2e gate, 2e + 1 up of entry e
  Line<kMaxSlots> down;    // job e
};

// What the kernels of a call get.
struct ExpertsArguments {
  const ExpertMatrices* experts;
  ExpertsPlan* plan;
  Start* starts;            // [2, n_warps]
  const float* x;
  const int32_t* ids;
  const float* weights;
  float* y;
  uint8_t* model_digits;
  RowScale* model_scales;
  uint8_t* ff_digits;
  FfScale* ff_scales;
  DigitSums* up_parts;
  int64_t* down_parts;
  float* slot_outputs;
  uint32_t* up_arrivals;     // [entries, d_ff/128], pairs
  uint32_t* down_arrivals;   // [entries, d_model/128], pairs
  uint32_t* token_arrivals;  // [tokens, d_model/128], experts
  int d_model, d_ff, n_slots, n_active;
  float limit;
  int n_warps;
};

ExpertsArguments experts_arguments(const ExpertTable& table, const ExpertsParams& p, const ExpertsScratch& scratch);
Status check_experts(const ExpertTable& table, const ExpertsParams& p, const ExpertsScratch& scratch);
// Queues the rotation of the tokens for every slot's gate and up.
Status rotate_tokens(device::Stream& stream, const ExpertsArguments& a, bool has_dependent_launch);

// Who adds to a column group: warps first .. last, parts first + index .. last + index.
struct Arrivals {
  int first, last;
};

__device__ __forceinline__ Arrivals arrivals_of(const Job& job, int quota, int group, int n_pairs) {
  const unsigned begin = job.start + group * n_pairs * job.cost;
  return {static_cast<int>(begin / unsigned(quota)), static_cast<int>((begin + (n_pairs - 1) * job.cost) / unsigned(quota))};
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace espalier::codec::cuda
