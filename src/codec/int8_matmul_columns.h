// Where vector code finds the states of a tile when every lane is a column, computed at compile time from the ring's
// definition.
//
// A vector of states has 16 dword lanes, lane c for column c of the tile, all of one tile row: turn 4t + q is row 2t,
// 2t+1, 2t+8, 2t+9 for q = 0..3, so all lanes need the same activation and accumulators need no sum across lanes. The
// states of four (or two) turns are cut from one gather: four neighbouring bytes of the ring per lane, the first in the
// dword's top. Source: docs/formats/exl3.md, "Ring" and "Permutation".
#pragma once

#include <cstdint>

#include "codec/trellis.h"

namespace espalier::codec {

struct ColumnWindows {
  static constexpr int kLanes = 16;
  static constexpr int kTurns = 16;
  static constexpr int kMaxGathers = 8;

  int n_bytes = 0;                             // of a tile
  int n_gathers = 0;                           // 4 or 8; turn i is cut from gather i * n_gathers / 16
  uint8_t byte[kMaxGathers][4 * kLanes] = {};  // of the tile as stored
  int below[kTurns][kLanes] = {};              // bits of the gathered dword behind the window, 0..16
  bool has_above[kTurns] = {};                 // whether any lane has bits before the window

  constexpr bool is_aligned(int turn) const {  // nothing to shift
    for (int c = 0; c < kLanes; ++c) {
      if (below[turn][c] != 0) return false;
    }
    return true;
  }
};

constexpr ColumnWindows make_column_windows(int k2) {
  ColumnWindows w;
  w.n_bytes = 16 * k2;
  const int ring_bits = 8 * w.n_bytes;
  // One turn of the ring up, so that nothing is negative.
  auto end = [&](int turn, int c) {
    return window_end(k2, 8 * (4 * (c % 8) + turn / 4) + 4 * (c / 8) + turn % 4) + ring_bits;
  };
  auto first_byte = [&](int last_turn, int c) { return (end(last_turn, c) + 7) / 8 - 4; };
  auto fits = [&](int turns) {
    for (int first = 0; first < ColumnWindows::kTurns; first += turns) {
      for (int c = 0; c < ColumnWindows::kLanes; ++c) {
        if (8 * first_byte(first + turns - 1, c) > end(first, c) - 16) return false;
      }
    }
    return true;
  };
  const int turns = fits(4) ? 4 : 2;
  w.n_gathers = ColumnWindows::kTurns / turns;
  for (int turn = 0; turn < ColumnWindows::kTurns; ++turn) {
    for (int c = 0; c < ColumnWindows::kLanes; ++c) {
      const int first = first_byte(turn - turn % turns + turns - 1, c);
      for (int m = 0; m < 4;
           ++m) {  // byte m of the dword, lowest first; the ring's words lie with their last byte first
        const int b = (first + 3 - m) % w.n_bytes;
        w.byte[turn / turns][4 * c + m] = static_cast<uint8_t>(b / 4 * 4 + 3 - b % 4);
      }
      w.below[turn][c] = 8 * (first + 4) - end(turn, c);
      w.has_above[turn] = w.has_above[turn] || w.below[turn][c] != 16;
    }
  }
  return w;
}

}  // namespace espalier::codec
