#include "tensor/view.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

TEST(DType, names_round_trip) {
  for (int i = 0; i <= static_cast<int>(DType::kF64); ++i) {
    const auto d = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(dtype_name(d)), d);
    EXPECT_GE(dtype_size_bytes(d), 1);
  }
  EXPECT_FALSE(dtype_from_name("F4").has_value());
}

TEST(Tensor, starts_zeroed_and_aligned_and_copies_deeply) {
  Tensor a(DType::kF32, {3, 5});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0u);
  for (float v : a.as<float>()) EXPECT_EQ(v, 0.0f);
  a.f32()[7] = 2;
  Tensor b = a;
  b.f32()[7] = 3;
  EXPECT_EQ(a.f32()[7], 2.0f);
  EXPECT_EQ(b.shape(), (Shape{3, 5}));
  EXPECT_EQ(shape_text(b.shape()), "[3, 5]");
}

TEST(TensorDeathTest, reading_with_the_wrong_width_stops_the_process) {
  Tensor a(DType::kBF16, {4});
  EXPECT_DEATH(a.as<float>(), "BF16");
}

}  // namespace
}  // namespace espalier
