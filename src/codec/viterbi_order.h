// How the results of a step get from 2^in_bits vectors into memory order, planned at compile time.
//
// Number the bits of a node from its low end. A step leaves the new bits 0 .. in_bits-1 in the index of the vector and the bits from
// in_bits on in the index of the lane; in memory the lane index is bits 0, 1, 2, ... An exchange, two vectors in and two out for each
// pair of vectors, swaps one bit of the vector index against one of the lane index. The plan lists the exchanges that a target has
// and says which vector of the row each vector has become after them.
#pragma once

#include <array>
#include <cstdint>

namespace espalier::codec {
namespace {

enum class ExchangeKind : uint8_t {
  kInterleave,  // within blocks of 128 bits: the vector's bit becomes the lowest of the element index, the top one leaves
  kHalves,      // of 256 bits: the vector's bit becomes the block index
  kDwords,      // any permutation of the 32-bit parts of two vectors of 512 bits
};

struct Exchange {
  ExchangeKind kind = ExchangeKind::kInterleave;
  int vector_bit = 0;     // pairs are the vectors whose indices differ in this bit
  int element_bytes = 0;  // kInterleave
  // kDwords: sources of the vectors that get 0 and 1 in vector_bit; 16 and more are in the second vector of the pair
  std::array<uint32_t, 16> lower{}, upper{};
};

template <int kInBits>
struct OrderPlan {
  std::array<Exchange, 6> stage{};
  int n_stages = 0;
  std::array<int, 1 << kInBits> place{};  // of vector i in the row

  // lane_bytes 2 or 4; vector_bytes 16, 32 or 64.
  constexpr OrderPlan(int lane_bytes, int vector_bytes) {
    const int block_bits = lane_bytes == 2 ? 3 : 2;  // of the lane index within a block of 128 bits
    const int lane_bits = block_bits + (vector_bytes == 64 ? 2 : vector_bytes == 32 ? 1 : 0);
    for (int i = 0; i < kInBits; ++i) means_[i] = i;
    if (vector_bytes == 64) {
      if (lane_bytes == 2) interleave(0, kInBits + 2, 2);
      exchange_dwords(lane_bytes);
    } else {
      for (int i = 0; i < kInBits && i < block_bits; ++i) interleave(i, kInBits + block_bits - 1 - i, lane_bytes << i);
      if (vector_bytes == 32) {
        stage[n_stages].kind = ExchangeKind::kHalves;
        stage[n_stages++].vector_bit = swap_in(block_bits, kInBits + block_bits);
      }
    }
    for (int v = 0; v < 1 << kInBits; ++v) {
      for (int i = 0; i < kInBits; ++i) place[v] |= (v >> i & 1) << (means_[i] - lane_bits);
    }
  }

 private:
  // The bit of the vector index that meant node bit `in` means `out` from now on.
  constexpr int swap_in(int in, int out) {
    int i = 0;
    while (means_[i] != in) ++i;
    means_[i] = out;
    return i;
  }

  constexpr void interleave(int in, int out, int element_bytes) {
    stage[n_stages].kind = ExchangeKind::kInterleave;
    stage[n_stages].element_bytes = element_bytes;
    stage[n_stages++].vector_bit = swap_in(in, out);
  }

  // Brings in whichever of the wanted node bits the dword index lacks, each against the largest one that it has.
  constexpr void exchange_dwords(int lane_bytes) {
    const int first = lane_bytes == 2 ? 1 : 0;  // wanted: first .. first + 3
    std::array<int, 4> now = lane_bytes == 2 ? std::array<int, 4>{kInBits, kInBits + 1, kInBits + 3, kInBits + 4}
                                             : std::array<int, 4>{kInBits, kInBits + 1, kInBits + 2, kInBits + 3};
    const std::array<int, 4> wanted{first, first + 1, first + 2, first + 3};
    const auto find = [](const std::array<int, 4>& bits, int bit) {
      int i = 0;
      while (i < 4 && bits[i] != bit) ++i;
      return i;
    };
    for (int w = 0; w < 4; ++w) {
      if (find(now, wanted[w]) < 4) continue;
      int largest = 0;
      for (int i = 0; i < 4; ++i) largest = now[i] > now[largest] ? i : largest;
      const std::array<int, 4> before = now;
      const int pushed = now[largest];
      now[largest] = wanted[w];
      bool complete = true;
      for (int bit : wanted) complete = complete && find(now, bit) < 4;
      if (complete) now = wanted;
      Exchange& s = stage[n_stages++];
      s.kind = ExchangeKind::kDwords;
      s.vector_bit = swap_in(wanted[w], pushed);
      for (uint32_t p = 0; p < 16; ++p) {
        s.lower[p] = ((p >> find(now, wanted[w])) & 1u) << 4;
        s.upper[p] = s.lower[p];
        for (int i = 0; i < 4; ++i) {
          if (before[i] == pushed) {
            s.upper[p] |= 1u << i;
          } else {
            s.lower[p] |= ((p >> find(now, before[i])) & 1u) << i;
            s.upper[p] |= ((p >> find(now, before[i])) & 1u) << i;
          }
        }
      }
    }
  }

  std::array<int, kInBits> means_{};  // node bit of each bit of the vector index
};

template <int kInBits, int kLaneBytes, int kVectorBytes>
inline constexpr OrderPlan<kInBits> kOrderPlan{kLaneBytes, kVectorBytes};

}  // namespace
}  // namespace espalier::codec
