#include "bench/peer/exllamav3_search.h"

#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

#include "base/check.h"
#include "bench/peer/exllamav3_steps.h"
#include "codec/trellis.h"
#include "tensor/float_formats.h"

namespace espalier::peer {
namespace {

constexpr int kSize = codec::kTileSize;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kOverflow = 0x1.0p40f;  // stands for infinity between portable steps: keeps the sums below free of NaN

// fp32 -> nearest fp16 number, ties to even, as fp32; magnitudes of 65520 and more become kOverflow. Selections are
// integer masks, which compilers turn into vector code.
inline float nearest_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t normal = (bits + 0xFFFu + ((bits >> 13) & 1u)) & ~0x1FFFu;
  const uint32_t subnormal = std::bit_cast<uint32_t>((x + 0.75f) - 0.75f);  // in [0.5, 1) an fp32 step is 2^-24
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t is_small = magnitude < std::bit_cast<uint32_t>(0x1.0p-14f) ? 0xFFFFFFFFu : 0u;
  const uint32_t is_large = (normal & 0x7FFFFFFFu) >= std::bit_cast<uint32_t>(65536.0f) ? 0xFFFFFFFFu : 0u;
  const uint32_t rounded = (subnormal & is_small) | (normal & ~is_small);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(kOverflow) & is_large) | (rounded & ~is_large));
}

// fp16 fma(d, d, prev) for prev >= 0: the square is exact in fp32, the sum is rounded to odd and then to fp16, which
// equals one rounding.
inline float cost_f16(float prev, float code, float w) {
  const float d = nearest_f16(code - w);
  const float square = d * d;
  const float sum = prev + square;
  const float part = sum - prev;
  const float lost = (prev - (sum - part)) + (square - part);  // exact: prev + square = sum + lost
  const uint32_t bits = std::bit_cast<uint32_t>(sum);
  const uint32_t lost_bits = std::bit_cast<uint32_t>(lost);
  const uint32_t is_inexact = (lost_bits << 1) != 0 ? 0xFFFFFFFFu : 0u;
  const uint32_t is_even = (bits & 1u) - 1u;
  const uint32_t towards = 1u - (lost_bits >> 31) * 2u;  // +1 or -1
  return nearest_f16(std::bit_cast<float>(bits + (towards & is_inexact & is_even)));
}

template <int A, int B>
void step(const float* prev, float* next, const float* table, float w) {
  constexpr int kGroups = 1 << (16 - A - B);
  constexpr int kLanes = portable_lanes(A, B);
  for (int first = 0; first < kGroups; first += kLanes) {
    for (int l = 0; l < (1 << A); ++l) {
      float best[kLanes];
      for (int t = 0; t < kLanes; ++t) best[t] = kOverflow;
      for (int q = 0; q < (1 << B); ++q) {
        const float* in = prev + q * kGroups + first;
        for (int t = 0; t < kLanes; ++t) {
          const float cost = cost_f16(in[t], table[t], w);
          best[t] = cost < best[t] ? cost : best[t];
        }
        table += kLanes;
      }
      for (int t = 0; t < kLanes; ++t) next[((first + t) << A) | l] = best[t];
    }
  }
}

// How many cost vectors share one that is kept; the others are recomputed where the path passes.
constexpr int keep_stride(int k2) {
  return k2 == 2 ? 4 : k2 <= 4 ? 2 : 1;
}

constexpr uint32_t reverse5(uint32_t x) {
  return (x & 1u) << 4 | (x & 2u) << 2 | (x & 4u) | (x & 8u) >> 2 | (x & 16u) >> 4;
}

float to_float(float x) {
  return x;
}
float to_float(uint16_t x) {
  return x >= 0x7C00 ? kOverflow : decode_f16(x);
}
void from_float(float x, float* out) {
  *out = x == kInfinity ? kOverflow : x;
}
void from_float(float x, uint16_t* out) {
  *out = encode_f16(x);
}

}  // namespace

Step<float> portable_step(int a, int b) {
  if (a == b) {
    constexpr Step<float> kWhole[8] = {step<1, 1>, step<2, 2>, step<3, 3>, step<4, 4>,
                                       step<5, 5>, step<6, 6>, step<7, 7>, step<8, 8>};
    return kWhole[a - 1];
  }
  switch (10 * a + b) {
    case 12:
      return step<1, 2>;
    case 21:
      return step<2, 1>;
    case 23:
      return step<2, 3>;
    case 32:
      return step<3, 2>;
    case 34:
      return step<3, 4>;
    case 43:
      return step<4, 3>;
  }
  return nullptr;
}

struct TileSearch::Impl {
  virtual ~Impl() = default;
  virtual void run(const float* tile, uint16_t* states) = 0;
};

namespace {

template <typename T>
class Passes final : public TileSearch::Impl {
 public:
  Passes(const SearchRules& rules, Step<T> (*find)(int, int), int lanes)
      : k2_(rules.k2),
        stale_(rules.stale_argmin),
        stride_(keep_stride(rules.k2)),
        values_(codec::codebook_table_f32(rules.codebook)) {
    for (int parity = 0; parity < 2; ++parity) {
      const int a = bits(parity), b = bits(parity + 1);
      step_[parity] = find(a, b);
      CHECK(step_[parity] != nullptr) << "no search at " << codec::width_text(k2_) << " bits";
      table_[parity].resize(codec::kNStates);
      for (int s = 0; s < codec::kNStates; ++s) {
        const int at = table_index(s, a, b, lanes > 0 ? lanes : portable_lanes(a, b));
        from_float(values_[s], &table_[parity][static_cast<size_t>(at)]);
      }
    }
    n_most_ = 65536 >> (k2_ / 2);
    for (std::vector<T>& v : scratch_) v.resize(static_cast<size_t>(n_most_));
    kept_.resize(static_cast<size_t>(n_most_) * static_cast<size_t>(kSize / stride_));
  }

  void run(const float* tile, uint16_t* states) override {
    for (int p = 0; p < kSize; ++p) {
      CHECK(std::fabs(tile[p]) < 60000.0f) << "target " << tile[p] << " of the fp16 search";
      w_[p] = espalier::round_f16(tile[p]);
    }
    forward(128, -1, 127);
    int node = best_node(stale_ ? before_last_ : last_);
    for (int i = kSize - 1; i >= 128; --i) node = winner(i, node);
    const int boundary = node;
    forward(0, boundary, 0);
    for (int p = kSize - 1; p >= 0; --p) {
      const int previous = winner(p, node);
      states[p] = static_cast<uint16_t>((previous << bits(p)) | node);
      node = previous;
    }
  }

 private:
  int bits(int p) const { return codec::step_bits(k2_, p); }
  int position(int i) const { return (i + roll_) % kSize; }
  bool is_kept(int i) const { return i >= keep_from_ && i % stride_ == stride_ - 1; }
  T* kept(int i) { return kept_.data() + static_cast<size_t>(i / stride_) * static_cast<size_t>(n_most_); }

  void forward(int roll, int start, int keep_from) {
    roll_ = roll;
    start_ = start;
    keep_from_ = keep_from;
    T zero, infinity;
    from_float(0, &zero);
    from_float(kInfinity, &infinity);
    scratch_[1].assign(static_cast<size_t>(n_most_), start < 0 ? zero : infinity);
    if (start >= 0) scratch_[1][static_cast<size_t>(start)] = zero;
    last_ = scratch_[1].data();
    for (int i = 0; i < kSize; ++i) {
      const int p = position(i);
      before_last_ = last_;
      T w;
      from_float(w_[p], &w);
      T* next = is_kept(i) ? kept(i) : scratch_[before_last_ == scratch_[0].data() ? 1 : 0].data();
      step_[p & 1](before_last_, next, table_[p & 1].data(), w);
      last_ = next;
    }
  }

  // Cost of `node` before step i.
  float cost_before(int i, int node) {
    if (i == 0) return start_ < 0 || node == start_ ? 0.0f : kOverflow;
    if (is_kept(i - 1)) return to_float(kept(i - 1)[node]);
    return best_branch(i - 1, node).first;
  }

  // Least cost of out-node `node` after step i, and the in-node of its first winner.
  std::pair<float, int> best_branch(int i, int node) {
    const int p = position(i);
    const int a = bits(p), b = bits((p + 1) % kSize);
    std::pair<float, int> best{kOverflow, node >> a};
    for (int q = 0; q < (1 << b); ++q) {
      const int s = (q << (16 - b)) | node;
      const float cost = cost_f16(cost_before(i, s >> a), values_[s], w_[p]);
      if (cost < best.first) best = {cost, s >> a};
    }
    return best;
  }

  int winner(int i, int node) { return best_branch(i, node).second; }

  // Smallest cost; ties in the order that upstream's reduction tree produced.
  int best_node(const T* costs) const {
    const auto rank = [](uint32_t e) { return std::tuple(reverse5((e & 1023) >> 5), reverse5(e & 31), e >> 10); };
    T least = costs[0];  // fp16 bits of non-negative numbers compare as the numbers do
    for (int e = 1; e < n_most_; ++e) least = costs[e] < least ? costs[e] : least;
    int best = -1;
    for (int e = 0; e < n_most_; ++e) {
      if (costs[e] == least && (best < 0 || rank(static_cast<uint32_t>(e)) < rank(static_cast<uint32_t>(best))))
        best = e;
    }
    return best;
  }

  int k2_;
  bool stale_;
  int stride_;
  const float* values_;
  int n_most_ = 0;  // nodes of the largest set
  Step<T> step_[2] = {};
  std::vector<T> table_[2];
  std::vector<T> scratch_[2];
  std::vector<T> kept_;
  float w_[kSize] = {};
  int roll_ = 0, start_ = -1, keep_from_ = 0;
  const T* last_ = nullptr;
  const T* before_last_ = nullptr;
};

}  // namespace

SearchTier best_search_tier() {
  return usable_search_tiers().back();
}

std::vector<SearchTier> usable_search_tiers() {
  static const std::vector<SearchTier> tiers = [] {
    std::vector<SearchTier> usable = {SearchTier::kPortable};
    if (has_avx512_instructions()) usable.push_back(SearchTier::kAvx512);
    if (has_fp16_instructions()) usable.push_back(SearchTier::kFp16);
    return usable;
  }();
  return tiers;
}

TileSearch::TileSearch(const SearchRules& rules) {
  CHECK(codec::is_width(rules.k2)) << rules.k2 << " half bits";
  CHECK(rules.k2 % 2 == 0 || !rules.stale_argmin) << "v1.4.1 has no half-bit widths";
  switch (rules.tier) {
    case SearchTier::kFp16:
      impl_ = std::make_unique<Passes<uint16_t>>(rules, fp16_step, kFp16Lanes);
      break;
    case SearchTier::kAvx512:
      impl_ = std::make_unique<Passes<uint16_t>>(rules, avx512_step, kFp16Lanes);
      break;
    case SearchTier::kPortable:
      impl_ = std::make_unique<Passes<float>>(rules, portable_step, 0);
      break;
  }
}

TileSearch::~TileSearch() = default;
TileSearch::TileSearch(TileSearch&&) noexcept = default;
TileSearch& TileSearch::operator=(TileSearch&&) noexcept = default;

void TileSearch::run(const float* tile, uint16_t* states) {
  impl_->run(tile, states);
}

}  // namespace espalier::peer
