// How one block shares the 65536 states of a step among its threads. Internal to the GPU search.
//
// A state is x (upper kXBits) | middle | y (lower kYBits). A thread owns all states of a few middles, 128 in all, at
// every step, so their codes stay in registers. In-node = state without the bits it took in; out-node = state without
// the bits that the next step drops. All states of a thread with equal out-node differ only in x, and those with equal
// x share in-nodes:
//   in-node  (x, middle, upper part of y)         out-node  (lower part of x, middle, y)
// where those parts exist only at half-integer widths, whose steps take in K - 1/2 and K + 1/2 bits in turn.
#pragma once

#include <cstdint>

#include "codec/cuda/viterbi_variant.h"
#include "codec/trellis.h"
#include "codec/viterbi_cost.h"

namespace espalier::codec::cuda {

inline constexpr int kSearchWarps = kSearchThreads / 32;

// kTiles: tiles searched in lockstep, which share the unpacking of codes. kNarrow: cost arrays have 16 bits a node,
// not 32. kInShared: they are in shared memory, otherwise in device memory.
template <int kK2_, int kTiles_, bool kNarrow_, bool kInShared_ = true>
struct SearchShape {
  static constexpr int kK2 = kK2_;
  static constexpr int kTiles = kTiles_;
  static constexpr bool kNarrow = kNarrow_;
  static constexpr bool kInShared = kInShared_;
  static constexpr CostRule kRule = cost_rule(kK2);

  static constexpr int kXBits = (kK2 + 1) / 2;  // the more of both steps' bits
  static constexpr int kYBits = kXBits < 3 ? kXBits : kXBits <= 4 ? 3 : kXBits == 5 ? 2 : kXBits == 6 ? 1 : 0;
  static constexpr int kMiddleBits = 16 - kXBits - kYBits;
  static constexpr int kSplit = kXBits == 8 ? 2 : 1;  // threads that share an out-node, each with a part of the x
  static constexpr int kX = (1 << kXBits) / kSplit;   // x per thread
  static constexpr int kY = 1 << kYBits;
  static constexpr int kMiddles = 2 * kCodeWords / (kX * kY);  // per thread
  static constexpr int kVector = kXBits < 3 ? 4 : 1;           // of which so many are neighbours
  static constexpr int kChunk = kX < 4 ? kX : 4;               // x in registers at a time
  static_assert(kMiddles * kSearchThreads == (kSplit << kMiddleBits));

  static constexpr int kInBits(int parity) { return step_bits(kK2, parity); }
  static constexpr int kOutBits(int parity) { return step_bits(kK2, parity + 1); }
  static constexpr int kInParts(int parity) { return kInBits(parity) < kYBits ? 1 << (kYBits - kInBits(parity)) : 1; }
  static constexpr int kOutParts(int parity) { return 1 << (kXBits - kOutBits(parity)); }
  static constexpr int kNodes(int parity) {
    return 65536 >> step_bits(kK2, parity);
  }  // in front of positions of this parity

  // Only every kSegment-th cost vector is kept; the trace back computes what is between. At most 256 nodes reach a node
  // in a segment.
  static constexpr int kSegment = kK2 == 2 ? 8 : kK2 <= 4 ? 4 : kK2 <= 8 ? 2 : 1;
  static constexpr int kPeriod = kK2 >= 10 ? 4 : 16;  // steps between subtractions of the minimum
  static constexpr int kRowNodes = kNodes(0);
  static constexpr int kRowsOfTile = kTileSize / kSegment * kRowNodes;  // 16-bit numbers
  static constexpr int kCostBytes = kNarrow ? 2 : 4;
  static constexpr int kSideBytes(int parity) { return kNodes(parity) * kCostBytes; }
  static constexpr int kTileBytes = kSideBytes(0) + kSideBytes(1);  // costs in front of even and of odd positions

  // The n-th middle of a thread, n < kMiddles.
  static __host__ __device__ int middle(int thread, int n) {
    if (kSplit == 2) return thread / 2;
    return kVector * (thread + n / kVector * kSearchThreads) + n % kVector;
  }
  static __host__ __device__ int first_x(int thread) { return kSplit == 2 ? thread % 2 * kX : 0; }
  static __host__ __device__ int state(int x, int middle, int y) {
    return (x << (16 - kXBits)) | (middle << kYBits) | y;
  }
  // Node in front of a step for (x = 0, middle, part); parts are neighbours, and x are kInStride apart.
  static __host__ __device__ int in_node(int parity, int middle, int part) {
    return state(0, middle, part << kInBits(parity)) >> kInBits(parity);
  }
  static constexpr int kInStride(int parity) { return 1 << (16 - kXBits - kInBits(parity)); }
  // Node behind a step; y are neighbours.
  static __host__ __device__ int out_node(int parity, int part, int middle) {
    return state(part, middle, 0) & (kNodes(parity + 1) - 1);
  }
  // Register and half that hold the code of the thread's n-th middle, x (from first_x) and y.
  static __host__ __device__ int code_word(int n, int x, int y) {
    return ((n * (kX / kChunk) + x / kChunk) * kY + y) * (kChunk / 2) + x % kChunk / 2;
  }

  // Where the cost of a node sits in its array: 16-byte pieces are exchanged so that threads that write 32 or 64 bytes
  // each meet no bank conflicts. Only nodes' lower 8 bits matter, so place(node + x * kInStride) = place(node) + x *
  // kInStride.
  static __host__ __device__ int place(int node) {
    if (kY < 8 && kVector == 1) return node;
    return kNarrow ? node ^ (((node >> 6) & 3) << 3) : node ^ (((node >> 5) & 3) << 2);
  }
};

}  // namespace espalier::codec::cuda
