// The tests of tests/gpu, all in one program because a GPU is one thing: with --gtest_filter as usual.
#include <gtest/gtest.h>

#include <cstdio>

#include "device/device.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const auto devices = espalier::device::list_devices();
  if (!devices.ok()) {
    std::printf("GPU tests skipped: %s\n", devices.error().message().c_str());
    return 77;
  }
  std::printf("GPU tests on %s\n", devices->front().text().c_str());
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a forked child cannot use the parent's CUDA context
  return RUN_ALL_TESTS();
}
