#include "codec/strip_product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/rng.h"

namespace espalier::codec {
namespace {

struct Inputs {
  std::vector<double> a, strip, out;
};

Inputs make_inputs(int64_t rows, int64_t cols, int64_t stride) {
  const CounterRng rng(1, "strip product");
  Inputs in;
  in.a.resize(static_cast<size_t>(rows * stride));
  in.strip.resize(static_cast<size_t>(cols * kStripWidth));
  in.out.resize(static_cast<size_t>(rows * stride));
  for (size_t i = 0; i < in.a.size(); ++i) in.a[i] = rng.uniform(i) - 0.5;
  for (size_t i = 0; i < in.strip.size(); ++i) in.strip[i] = rng.uniform(1000000 + i) - 0.5;
  for (size_t i = 0; i < in.out.size(); ++i) in.out[i] = rng.uniform(2000000 + i) - 0.5;
  return in;
}

std::vector<double> run(Inputs in, int64_t rows, int64_t cols, int64_t stride, bool add, SimdTier tier) {
  StripProduct p;
  p.a = in.a.data();
  p.a_stride = stride;
  p.strip = in.strip.data();
  p.out = in.out.data();
  p.out_stride = stride;
  p.rows = rows;
  p.cols = cols;
  p.add = add;
  strip_product(p, tier);
  return in.out;
}

TEST(StripProduct, every_tier_is_the_plain_chain_bit_for_bit) {
  const int64_t stride = 77;
  for (int64_t rows : {1, 3, 16, 23}) {
    for (int64_t cols : {0, 1, 16, 61}) {
      for (bool add : {false, true}) {
        const Inputs in = make_inputs(rows, cols, stride);
        std::vector<double> expected = in.out;
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t c = 0; c < kStripWidth; ++c) {
            volatile double sum =
                add ? in.out[static_cast<size_t>(i * stride + c)] : 0.0;  // volatile: both operations are rounded
            for (int64_t j = 0; j < cols; ++j) {
              volatile double product =
                  in.a[static_cast<size_t>(i * stride + j)] * in.strip[static_cast<size_t>(j * kStripWidth + c)];
              sum = sum + product;
            }
            expected[static_cast<size_t>(i * stride + c)] = sum;
          }
        }
        for (SimdTier tier : usable_simd_tiers()) {
          EXPECT_EQ(run(in, rows, cols, stride, add, tier), expected)
              << simd_tier_name(tier) << " rows " << rows << " cols " << cols << " add " << add;
        }
      }
    }
  }
}

}  // namespace
}  // namespace espalier::codec
