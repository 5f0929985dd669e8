// The fixture of the tests of src/ops/cuda: inputs go up, outputs come down, and every result is held twice, to the plain-loop reference
// within a tolerance computed from sizes and operands, and to the bits of the CPU.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/simd_tier.h"
#include "conformance/ops_cases.h"
#include "device/buffer.h"
#include "tests/gpu/exl3_data.h"

namespace espalier::ops {

using codec::cuda::must;
using codec::cuda::taken;

// Counts and shows where two results differ in bits; NaN of any payload are equal.
inline std::string bit_differences(const std::vector<float>& got, const std::vector<float>& expected) {
  if (got.size() != expected.size()) return std::to_string(got.size()) + " values for " + std::to_string(expected.size());
  size_t n = 0, first = 0, worst = 0;
  double most = -1;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &expected[i], 4) == 0 || (std::isnan(got[i]) && std::isnan(expected[i]))) continue;
    if (n++ == 0) first = i;
    const double d = std::fabs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    if (!(d <= most)) most = d, worst = i;
  }
  if (n == 0) return "";
  const auto at = [&](size_t i) { return std::to_string(i) + " (" + std::to_string(got[i]) + " for " + std::to_string(expected[i]) + ")"; };
  char difference[32];
  std::snprintf(difference, sizeof difference, "%.3g", most);
  return std::to_string(n) + " of " + std::to_string(got.size()) + " differ in bits, first at " + at(first) + ", largest difference " +
         difference + " at " + at(worst);
}

class OpsCuda : public ::testing::Test {
 protected:
  template <typename T>
  T* up(const std::vector<T>& values) {
    auto array = std::make_shared<device::DeviceArray<T>>(taken(device::DeviceArray<T>::upload(stream_, values, "test input")));
    kept_.push_back(array);
    return array->data();
  }
  // Filled with a NaN pattern, so that what is not written is seen.
  template <typename T>
  T* room(int64_t n) {
    auto array = std::make_shared<device::DeviceArray<T>>(taken(device::DeviceArray<T>::allocate(0, static_cast<size_t>(n), "test output")));
    if (n > 0) must(stream_.fill_bytes(array->data(), 0xFF, static_cast<size_t>(n) * sizeof(T)));
    kept_.push_back(array);
    return array->data();
  }
  template <typename T>
  std::vector<T> down(const T* from, int64_t n) {
    std::vector<T> out(static_cast<size_t>(n));
    if (n > 0) must(stream_.copy_to_host(out.data(), from, out.size() * sizeof(T)));
    must(stream_.synchronize());
    return out;
  }

  // run(pool): the operation on the CPU, all its outputs. tolerance(i) bounds |got - reference| of output i.
  void expect_conformance(const std::string& what, const std::vector<float>& got, const std::function<std::vector<float>(ThreadPool&)>& run,
                          const std::function<double(size_t)>& tolerance) {
    ASSERT_TRUE(set_simd_tier(SimdTier::kReference));
    const std::vector<float> reference = run(pool_);
    reset_simd_tier();
    const std::vector<float> cpu = run(pool_);
    ASSERT_EQ(got.size(), reference.size()) << what;
    size_t n_out = 0, first = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double d = std::fabs(static_cast<double>(got[i]) - static_cast<double>(reference[i]));
      if (!(d <= tolerance(i)) && n_out++ == 0) first = i;
    }
    EXPECT_EQ(n_out, 0u) << what << " against the reference: " << n_out << " of " << got.size() << " out of tolerance, first " << first << ": "
                         << got[first] << " and " << reference[first] << ", tolerance " << tolerance(first);
    EXPECT_EQ(bit_differences(got, cpu), "") << what << " against the CPU";
  }

  device::Stream stream_ = taken(device::Stream::create(0));
  ThreadPool pool_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace espalier::ops
