// Where vector code finds the states of a tile, computed at compile time from the ring's definition.
//
// A vector of the integer product has 64-bit lanes of four 16-bit states: lane i, vector 2t+h holds ring positions
// 8*(4i+t) + 4h + {0,1,2,3}, which are tile rows 2t, 2t+1, 2t+8, 2t+9 of column i + 8h. So all lanes of a vector need
// the same four activations, and a tile's 16 columns end in two accumulators. The states come from pairs of ring words
// (w[j-1], w[j]); a slot is one register of such pairs, one per lane, from which as many vectors as possible are cut.
// Source: docs/formats/exl3.md, "Ring" and "Permutation".
#pragma once

#include <cstdint>

#include "codec/trellis.h"

namespace espalier::codec {

struct RingWindows {
  static constexpr int kLanes = 8;
  static constexpr int kVectors = 8;
  static constexpr int kMaxSlots = 8;

  int n_words = 0;
  int n_slots = 0;
  int word[kMaxSlots][kLanes] = {};     // j of the pair (w[j-1], w[j]), 0..n_words-1; w[-1] is the ring's last word
  int slot[kVectors][2] = {};           // of positions 0,1 and of positions 2,3
  int below[kVectors][kLanes][4] = {};  // ring bits of the pair behind the window, 0..48
};

constexpr RingWindows make_ring_windows(int k2) {
  RingWindows w;
  w.n_words = 4 * k2;
  const int ring_bits = 128 * k2;
  // Pairs that hold positions first..last of vector v in lane i: j from lowest to highest. All bit numbers are one turn
  // up.
  struct Range {
    int lowest[RingWindows::kLanes];
    int highest[RingWindows::kLanes];
    constexpr bool empty() const {
      for (int i = 0; i < RingWindows::kLanes; ++i) {
        if (lowest[i] > highest[i]) return true;
      }
      return false;
    }
    constexpr Range intersect(const Range& o) const {
      Range r{};
      for (int i = 0; i < RingWindows::kLanes; ++i) {
        r.lowest[i] = lowest[i] > o.lowest[i] ? lowest[i] : o.lowest[i];
        r.highest[i] = highest[i] < o.highest[i] ? highest[i] : o.highest[i];
      }
      return r;
    }
  };
  auto position = [](int v, int i, int q) { return 8 * (4 * i + v / 2) + 4 * (v % 2) + q; };
  auto range = [&](int v, int first, int last) {
    Range r{};
    for (int i = 0; i < RingWindows::kLanes; ++i) {
      const int start = window_end(k2, position(v, i, first)) - 16 + ring_bits;
      const int end = window_end(k2, position(v, i, last)) + ring_bits;
      r.lowest[i] = (end + 31) / 32 - 1;
      r.highest[i] = start / 32 + 1;
    }
    return r;
  };
  Range current{};
  int slots = 0;
  auto place = [&](int v, int first, int last) {
    const Range wanted = range(v, first, last);
    const Range both = slots > 0 ? current.intersect(wanted) : wanted;
    if (slots == 0 || both.empty()) {
      ++slots;
      current = wanted;
    } else {
      current = both;
    }
    for (int i = 0; i < RingWindows::kLanes; ++i) w.word[slots - 1][i] = current.lowest[i];
    return slots - 1;
  };
  for (int v = 0; v < RingWindows::kVectors; ++v) {
    if (!range(v, 0, 3).empty()) {
      w.slot[v][0] = w.slot[v][1] = place(v, 0, 3);
    } else {  // 37 bits at K = 7 can straddle three words
      w.slot[v][0] = place(v, 0, 1);
      w.slot[v][1] = place(v, 2, 3);
    }
  }
  w.n_slots = slots;
  for (int v = 0; v < RingWindows::kVectors; ++v) {
    for (int i = 0; i < RingWindows::kLanes; ++i) {
      for (int q = 0; q < 4; ++q) {
        const int pair_end = 32 * (w.word[w.slot[v][q / 2]][i] + 1);
        w.below[v][i][q] = pair_end - (window_end(k2, position(v, i, q)) + ring_bits);
      }
    }
  }
  for (int s = 0; s < slots; ++s) {
    for (int i = 0; i < RingWindows::kLanes; ++i) w.word[s][i] %= w.n_words;
  }
  return w;
}

// f.operator()<k2>() for the given width.
template <typename F>
void with_width(int k2, F f) {
  switch (k2) {
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    case 4:
      return f.template operator()<4>();
    case 5:
      return f.template operator()<5>();
    case 6:
      return f.template operator()<6>();
    case 7:
      return f.template operator()<7>();
    case 8:
      return f.template operator()<8>();
    case 10:
      return f.template operator()<10>();
    case 12:
      return f.template operator()<12>();
    case 14:
      return f.template operator()<14>();
    case 16:
      return f.template operator()<16>();
    default:
      return;
  }
}

}  // namespace espalier::codec
