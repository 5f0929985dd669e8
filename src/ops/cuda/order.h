// In which order an operation adds up.
//
// kCpu   the CPU's order, for its bits
// kFast  another fixed order that more threads can share: the result differs from the CPU's by roundings only, and neither the other
//        rows nor the number of rows, threads or blocks of a launch change it
#pragma once

namespace espalier::ops::cuda {

enum class Order { kCpu, kFast };

}  // namespace espalier::ops::cuda
