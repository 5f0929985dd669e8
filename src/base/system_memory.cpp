#include "base/system_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace espalier {
namespace {

constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

uint64_t number_in(const char* path) {
  std::ifstream in(path);
  uint64_t value = 0;
  return in >> value ? value : kUnknown;
}

uint64_t available_in_meminfo() {
  std::ifstream in("/proc/meminfo");
  std::string key;
  uint64_t kib = 0;
  while (in >> key >> kib) {
    if (key == "MemAvailable:") return kib * 1024;
    in.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return kUnknown;
}

}  // namespace

uint64_t available_memory_bytes() {
  uint64_t out = available_in_meminfo();
  const uint64_t limit = number_in("/sys/fs/cgroup/memory.max");  // the word "max" is no number
  const uint64_t used = number_in("/sys/fs/cgroup/memory.current");
  if (limit != kUnknown && used != kUnknown) out = std::min(out, limit > used ? limit - used : 0);
  rlimit space{};
  if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY)
    out = std::min(out, static_cast<uint64_t>(space.rlim_cur));
  return out == kUnknown ? 0 : out;
}

}  // namespace espalier
