#include "tests/gpu/faults.h"

#include <cuda_runtime.h>

namespace espalier::gpu_tests {
namespace {

__global__ void wild_write_kernel(int* where) { *where = 1; }
__global__ void nothing_kernel() {}

}  // namespace

Status launch_wild_write(device::Stream& stream) {
  wild_write_kernel<<<1, 1, 0, stream.handle()>>>(nullptr);
  return stream.launched("wild_write_kernel");
}

Status launch_nothing(device::Stream& stream) {
  nothing_kernel<<<1, 1, 0, stream.handle()>>>();
  return stream.launched("nothing_kernel");
}

Status launch_impossible(device::Stream& stream) {
  nothing_kernel<<<1, 4096, 0, stream.handle()>>>();
  return stream.launched("nothing_kernel");
}

}  // namespace espalier::gpu_tests
