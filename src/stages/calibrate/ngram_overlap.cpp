#include "stages/calibrate/ngram_overlap.h"

#include <algorithm>

namespace espalier {
namespace {

uint64_t mixed(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

std::vector<uint64_t> NgramSet::runs(const DatasetRow& row) const {
  std::vector<uint64_t> out;
  const bool is_text = row.mode == "raw";
  auto first = row.ids.begin();
  if (!is_text && markers_.user) {
    first = std::find(row.ids.begin(), row.ids.end(), *markers_.user);
    if (first == row.ids.end()) first = row.ids.begin();
  }
  for (auto at = first; row.ids.end() - at >= n_; ++at) {
    if (!is_text && markers_.tool_call && std::find(at, at + n_, *markers_.tool_call) != at + n_) continue;
    uint64_t hash = static_cast<uint64_t>(n_);
    for (auto id = at; id != at + n_; ++id)
      hash = mixed(hash * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(static_cast<uint32_t>(*id)) + 1);
    out.push_back(hash);
  }
  return out;
}

void NgramSet::add(const DatasetRow& row) {
  for (uint64_t hash : runs(row)) seen_.insert(hash);
}

int64_t NgramSet::shared_with(const DatasetRow& row) const {
  int64_t n = 0;
  for (uint64_t hash : runs(row)) n += seen_.count(hash) != 0 ? 1 : 0;
  return n;
}

}  // namespace espalier
