// How much memory a process may still take.
#pragma once

#include <cstdint>

namespace espalier {

// The least of what the system has available (/proc/meminfo), what is left in the control group and the limit of the address
// space; absent sources do not count. 0 when nothing is known.
uint64_t available_memory_bytes();

}  // namespace espalier
