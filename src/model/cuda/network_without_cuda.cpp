#include "device/device.h"
#include "model/cuda/network.h"

namespace espalier::cuda {

class DeviceWeights {};

struct DeviceSequence::Impl {};

Result<std::shared_ptr<const DeviceModel>> DeviceModel::load(const std::string&, const LoadOptions&, int device, ThreadPool&) {
  const auto info = device::find_device(device);
  return info.ok() ? internal_error("a device without CUDA") : info.error();
}

const Config& DeviceModel::config() const {
  static const Config kNone;
  return kNone;
}
int DeviceModel::device() const { return 0; }
int64_t DeviceModel::size_bytes() const { return 0; }

Result<std::unique_ptr<DeviceSequence>> DeviceSequence::create(std::shared_ptr<const DeviceModel>, const SequenceOptions&) {
  return device::find_device(0).status();
}
DeviceSequence::DeviceSequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DeviceSequence::~DeviceSequence() = default;
int64_t DeviceSequence::n_tokens() const { return 0; }
Status DeviceSequence::truncate(int64_t) { return device::find_device(0).status(); }
void DeviceSequence::reset() {}
Result<Tensor> DeviceSequence::forward(std::span<const int32_t>, bool) { return device::find_device(0).status(); }
Status DeviceSequence::seed_drafter(int64_t) { return device::find_device(0).status(); }
Result<DraftResult> DeviceSequence::draft(int32_t) { return device::find_device(0).status(); }

}  // namespace espalier::cuda
