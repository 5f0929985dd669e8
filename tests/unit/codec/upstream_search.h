// exllamav3 v1.4.1's trellis search restated in plain loops, for comparison only: costs are fp16 numbers with one correctly rounded
// operation each, and the first pass takes its final node from the cost vector of the step before the last (its `stale` read).
// Source: docs/formats/exl3.md, "Upstream's search".
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>
#include <vector>

#include "codec/codebook.h"
#include "codec/trellis.h"
#include "tensor/float_formats.h"

namespace espalier::codec::upstream {

// Nearest fp16 of a double of magnitude below 65520, ties to even. The sums below are exact in fp64 wherever rounding could
// depend on it: an fp16 number plus a 22-bit square, at most 53 bits apart unless the square is negligible.
inline double round_f16(double x) {
  const uint64_t magnitude = std::bit_cast<uint64_t>(x) & 0x7FFFFFFFFFFFFFFFull;
  if (magnitude < std::bit_cast<uint64_t>(0x1.0p-14)) {
    const double aligned = 0x1.8p28;  // ulp 2^-24
    return (x + aligned) - aligned;
  }
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint64_t rounded = bits + 0x1FFFFFFFFFFull + ((bits >> 42) & 1);
  return std::bit_cast<double>(rounded & ~0x3FFFFFFFFFFull);
}

inline uint32_t reverse5(uint32_t x) {
  uint32_t r = 0;
  for (int i = 0; i < 5; ++i) r |= ((x >> i) & 1u) << (4 - i);
  return r;
}

class Search {
 public:
  Search(int width, Codebook codebook)
      : width_(width), n_nodes_(65536 >> width), values_(codebook_table_f32(codebook)), back_(static_cast<size_t>(256) * n_nodes_) {}

  // stale: as v1.4.1; otherwise the first pass ends at the best node of its last step.
  void run(const float* tile, bool stale, uint16_t* states) {
    for (int p = 0; p < 256; ++p) w_[p] = espalier::round_f16(tile[p]);
    forward(128, -1);
    int node = best_node(stale ? before_last_ : last_);
    for (int i = 255; i >= 128; --i) node = back_[static_cast<size_t>((i + 128) % 256) * n_nodes_ + node];
    const int boundary = node;
    forward(0, boundary);
    for (int p = 255; p >= 0; --p) {
      const int previous = back_[static_cast<size_t>(p) * n_nodes_ + node];
      states[p] = static_cast<uint16_t>((previous << width_) | node);
      node = previous;
    }
  }

 private:
  void forward(int roll, int start) {
    constexpr double kInfinity = 1e300;
    last_.assign(static_cast<size_t>(n_nodes_), 0.0);
    if (start >= 0) {
      last_.assign(static_cast<size_t>(n_nodes_), kInfinity);
      last_[static_cast<size_t>(start)] = 0;
    }
    std::vector<double> squares(65536);
    for (int i = 0; i < 256; ++i) {
      const int p = (i + roll) % 256;
      before_last_ = last_;
      uint16_t* back = back_.data() + static_cast<size_t>(p) * n_nodes_;
      for (int s = 0; s < 65536; ++s) {
        const double d = round_f16(double{values_[s]} - w_[p]);
        squares[static_cast<size_t>(s)] = d * d;  // exact: 22 bits
      }
      for (int e = 0; e < n_nodes_; ++e) {
        double best = kInfinity;
        int winner = e >> width_;
        for (int q = 0; q < (1 << width_); ++q) {
          const int s = (q << (16 - width_)) | e;
          const double before = before_last_[static_cast<size_t>(s >> width_)];
          double cost = before + squares[static_cast<size_t>(s)];
          cost = cost < 65520 ? round_f16(cost) : kInfinity;
          if (cost < best) {
            best = cost;
            winner = s >> width_;
          }
        }
        last_[static_cast<size_t>(e)] = best;
        back[e] = static_cast<uint16_t>(winner);
      }
    }
  }

  // Smallest cost; ties in the order that upstream's reduction tree produced.
  int best_node(const std::vector<double>& costs) const {
    const auto rank = [](uint32_t e) { return std::tuple(reverse5((e & 1023) >> 5), reverse5(e & 31), e >> 10); };
    int best = 0;
    for (int e = 1; e < n_nodes_; ++e) {
      const double a = costs[static_cast<size_t>(e)];
      const double b = costs[static_cast<size_t>(best)];
      if (a < b || (a == b && rank(static_cast<uint32_t>(e)) < rank(static_cast<uint32_t>(best)))) best = e;
    }
    return best;
  }

  int width_;
  int n_nodes_;
  const float* values_;
  double w_[256] = {};
  std::vector<double> before_last_, last_;
  std::vector<uint16_t> back_;
};

}  // namespace espalier::codec::upstream
