// Kernels that go wrong on purpose, for the tests of error reports.
#pragma once

#include "device/stream.h"

namespace espalier::gpu_tests {

// Writes through a null pointer.
Status launch_wild_write(device::Stream& stream);
// Does nothing, properly.
Status launch_nothing(device::Stream& stream);
// Asks for more threads in a block than any device has.
Status launch_impossible(device::Stream& stream);

}  // namespace espalier::gpu_tests
