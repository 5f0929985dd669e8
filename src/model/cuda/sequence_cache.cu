#include "model/cuda/sequence_cache.h"

#include <algorithm>

#include "model/state.h"
#include "ops/cpu/kernels.h"  // kPanelWidth

namespace espalier::cuda {

Result<SequenceCache> SequenceCache::create(device::Stream& stream, const Config& config) {
  SequenceCache cache;
  cache.n_slots = config.window + SequencePosition::kRewindRows;
  cache.head_dim = config.head_dim;
  const auto allocate = [&](int64_t n, device::DeviceArray<float>& to) -> Status {
    ASSIGN_OR_RETURN(to, device::DeviceArray<float>::allocate(stream.device(), static_cast<size_t>(n), "caches of a sequence"));
    return ok_status();
  };
  RETURN_IF_ERROR(allocate(config.n_layers * cache.n_slots * cache.head_dim, cache.windows_));
  cache.compressed.resize(static_cast<size_t>(config.n_layers));
  for (int l = 0; l < config.n_layers; ++l) {
    const int64_t m = config.ratio(l);
    if (!config.is_kv_source(l) || m <= 1) continue;
    CompressedRows& c = cache.compressed[static_cast<size_t>(l)];
    c.n_group_slots = (m + SequencePosition::kRewindRows + m - 1) / m * m;
    RETURN_IF_ERROR(allocate(c.n_group_slots * config.head_dim, c.group_kv));
    RETURN_IF_ERROR(allocate(c.n_group_slots * config.head_dim, c.group_gate));
  }
  return Result<SequenceCache>(std::move(cache));
}

Status SequenceCache::reserve(device::Stream& stream, const Config& config, CompressedRows& rows, int64_t n_entries) {
  if (n_entries <= rows.capacity) return ok_status();
  const int64_t capacity = (std::max({n_entries, 2 * rows.capacity, int64_t{256}}) + ops::kPanelWidth - 1) / ops::kPanelWidth * ops::kPanelWidth;
  const auto grow = [&](device::DeviceArray<float>& array, int64_t width) -> Status {
    ASSIGN_OR_RETURN(auto larger, device::DeviceArray<float>::allocate(stream.device(), static_cast<size_t>(capacity * width), "compressed cache of a sequence"));
    if (array.size() > 0) RETURN_IF_ERROR(stream.copy_on_device(larger.data(), array.data(), array.size() * sizeof(float)));
    RETURN_IF_ERROR(stream.synchronize());  // before the old memory goes
    array = std::move(larger);
    return ok_status();
  };
  RETURN_IF_ERROR(grow(rows.kv, config.head_dim));
  RETURN_IF_ERROR(grow(rows.index_keys, config.index_head_dim));
  rows.capacity = capacity;
  return ok_status();
}

size_t SequenceCache::size_bytes() const {
  size_t floats = windows_.size();
  for (const CompressedRows& c : compressed) floats += c.kv.size() + c.index_keys.size() + c.group_kv.size() + c.group_gate.size();
  return floats * sizeof(float);
}

}  // namespace espalier::cuda
