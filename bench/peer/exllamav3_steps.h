// One step of the fp16-cost search over a whole cost vector; internal to the restatement.
//
// A step of position p shifts A = bits(p) new bits in and is followed by one that shifts B = bits(p + 1) in. In-nodes
// are the upper 16-A bits of a state, out-nodes its lower 16-B bits. State s = (q << (16-B)) | (g << A) | l with q <
// 2^B, l < 2^A:
//   in-node q * G + g, out-node g * 2^A + l, G = 2^(16-A-B)
#pragma once

#include <cstdint>

namespace espalier::peer {

// prev, next: costs by node. table: the codebook's values in the order of table_index. w: the target, an fp16 number.
template <typename T>
using Step = void (*)(const T* prev, T* next, const T* table, T w);

// Lanes go over g when there are enough groups, else over l (kLanes <= 2^A, 16-bit tiers only).
constexpr bool is_by_groups(int a, int b, int lanes) {
  return (1 << (16 - a - b)) >= lanes;
}

// Where state s sits in the table that a step of `lanes` lanes reads front to back.
constexpr int table_index(int state, int a, int b, int lanes) {
  const int q = state >> (16 - b);
  const int g = (state >> a) & ((1 << (16 - a - b)) - 1);
  const int l = state & ((1 << a) - 1);
  if (is_by_groups(a, b, lanes)) return (((g / lanes) << a | l) << b | q) * lanes + g % lanes;
  return ((g << a | l / lanes * lanes) << b) + q * lanes + l % lanes;
}

constexpr int kFp16Lanes = 32;
constexpr int portable_lanes(int a, int b) {
  return (1 << (16 - a - b)) < 16 ? (1 << (16 - a - b)) : 16;
}

// Null for pairs that no width uses: (K, K) for K = 1..8, and (1,2) (2,1) (2,3) (3,2) (3,4) (4,3).
Step<float> portable_step(int a, int b);
Step<uint16_t> fp16_step(int a, int b);  // costs, table and target as fp16 bits
bool has_fp16_instructions();
Step<uint16_t> avx512_step(int a, int b);  // the same layout and results without FP16 arithmetic
bool has_avx512_instructions();

}  // namespace espalier::peer
