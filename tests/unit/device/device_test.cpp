#include "device/device.h"

#include <gtest/gtest.h>

namespace espalier::device {
namespace {

// Runs on machines with and without a GPU; tests/gpu needs one.
TEST(Device, either_lists_devices_or_says_why_there_are_none) {
  const Result<std::vector<DeviceInfo>> devices = list_devices();
  if (devices.ok()) {
    ASSERT_FALSE(devices->empty());
    EXPECT_GE(devices->front().n_multiprocessors, 1);
    EXPECT_GE(devices->front().major, 5);
    const Result<DeviceInfo> beyond = find_device(static_cast<int>(devices->size()));
    ASSERT_FALSE(beyond.ok());
    EXPECT_EQ(beyond.error().code(), StatusCode::kInvalidArgument);
  } else {
    EXPECT_EQ(devices.error().code(), StatusCode::kUnavailable);
    EXPECT_NE(devices.error().message().find("; "), std::string::npos) << "no advice in: " << devices.error().message();
    EXPECT_EQ(find_device(0).error().code(), StatusCode::kUnavailable);
  }
}

}  // namespace
}  // namespace espalier::device
