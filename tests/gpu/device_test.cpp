#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>

#include "device/buffer.h"
#include "device/device.h"
#include "device/graph.h"
#include "device/stream.h"
#include "tests/gpu/faults.h"

namespace espalier::device {
namespace {

using ::testing::HasSubstr;

Stream new_stream() {
  Result<Stream> stream = Stream::create(0);
  CHECK(stream.ok()) << stream.error().message();
  return std::move(stream).value();
}

TEST(DeviceBuffer, what_goes_up_comes_down) {
  Stream stream = new_stream();
  std::vector<uint32_t> values(1000003);
  std::iota(values.begin(), values.end(), 7u);
  const auto array = DeviceArray<uint32_t>::upload(stream, values, "numbers");
  ASSERT_TRUE(array.ok()) << array.error().message();
  EXPECT_EQ(*array->download(stream), values);
}

TEST(DeviceBuffer, asking_for_too_much_says_how_much_is_free) {
  const auto buffer = DeviceBuffer::allocate(0, size_t{1} << 50, "a petabyte");
  ASSERT_FALSE(buffer.ok());
  EXPECT_EQ(buffer.error().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(buffer.error().message(), HasSubstr("a petabyte"));
  EXPECT_THAT(buffer.error().message(), HasSubstr("free"));
  Stream stream = new_stream();  // and the failure stays with the call that made it
  EXPECT_TRUE(gpu_tests::launch_nothing(stream).ok());
  EXPECT_TRUE(stream.synchronize().ok());
}

TEST(Stream, a_refused_launch_is_reported_at_once_and_does_not_stick) {
  Stream stream = new_stream();
  stream.begin_step("trying too much");
  const Status refused = gpu_tests::launch_impossible(stream);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.message(), HasSubstr("step 'trying too much' on device 0"));
  EXPECT_TRUE(gpu_tests::launch_nothing(stream).ok());
  EXPECT_TRUE(stream.synchronize().ok());
}

// A fault ends the process's CUDA context, so this runs in a process of its own.
TEST(StreamDeathTest, a_fault_names_the_step_and_the_kernels) {
  EXPECT_EXIT(
      {
        Stream stream = new_stream();
        stream.begin_step("layer 7 experts");
        Status status = gpu_tests::launch_nothing(stream);
        if (status.ok()) status = gpu_tests::launch_wild_write(stream);
        if (status.ok()) status = stream.synchronize();
        std::fprintf(stderr, "%s\n", status.message().c_str());
        std::_Exit(status.ok() ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "step 'layer 7 experts' on device 0.*nothing_kernel, wild_write_kernel.*cudaErrorIllegalAddress");
}

TEST(Graph, replays_what_was_recorded) {
  Stream stream = new_stream();
  const std::vector<float> values(4096, 1.5f);
  const auto from = DeviceArray<float>::upload(stream, values, "from");
  const auto to = DeviceArray<float>::allocate(0, values.size(), "to");
  ASSERT_TRUE(from.ok() && to.ok());
  ASSERT_TRUE(stream.fill_bytes(to->data(), 0, values.size() * sizeof(float)).ok());
  ASSERT_TRUE(stream.synchronize().ok());
  const auto graph = Graph::capture(stream, [&] { return stream.copy_on_device(to->data(), from->data(), values.size() * sizeof(float)); });
  ASSERT_TRUE(graph.ok()) << graph.error().message();
  EXPECT_EQ((*to->download(stream))[0], 0.0f) << "capturing must not run anything";
  ASSERT_TRUE(graph->launch(stream).ok());
  EXPECT_EQ(*to->download(stream), values);
}

TEST(Event, time_between_two_events_is_positive) {
  Stream stream = new_stream();
  Result<Event> start = Event::create(), stop = Event::create();
  ASSERT_TRUE(start.ok() && stop.ok());
  ASSERT_TRUE(start->record(stream).ok());
  ASSERT_TRUE(gpu_tests::launch_nothing(stream).ok());
  ASSERT_TRUE(stop->record(stream).ok());
  const Result<double> ms = stop->milliseconds_since(*start);
  ASSERT_TRUE(ms.ok()) << ms.error().message();
  EXPECT_GT(*ms, 0);
}

}  // namespace
}  // namespace espalier::device
