#include "codec/cuda/quantizer.h"

#include <algorithm>
#include <utility>

#include "codec/cuda/factor.h"
#include "codec/cuda/quantizer_group.h"

namespace espalier::codec {
namespace {

using device::DeviceArray;

constexpr int kMaxRetries = 10;
constexpr size_t kFactorsAtOnce = 4;  // a factorisation alone leaves most of the device idle

// One factorisation on a stream of its own.
struct FactorLane {
  device::Stream stream;
  DeviceArray<double> factor;
  DeviceArray<int> failed;
};

Status queue_factor(FactorLane& lane, GroupWork& w, const GroupState& g, double damping) {
  RETURN_IF_ERROR(rotate_hessian_on_device(lane.stream, w.hessian->values.data(), w.signed_su.data(), damping, g.k,
                                           lane.factor.data()));
  RETURN_IF_ERROR(cholesky_on_device(lane.stream, lane.factor.data(), g.k, lane.failed.data()));
  return block_ldl_feedback_on_device(lane.stream, lane.factor.data(), g.k, w.feedback.data());
}

// Waits for a factor; raises the damping until the Hessian can be factorised.
Status finish_factor(FactorLane& lane, GroupWork& w, const GroupState& g, double& damping) {
  for (int retry = 0;; ++retry) {
    ASSIGN_OR_RETURN(const std::vector<int> flag, lane.failed.download(lane.stream));
    if (flag[0] == 0) return ok_status();
    if (retry == kMaxRetries) {
      return failed_precondition(w.name + ": the Hessian is not positive definite even with damping " +
                                 std::to_string(damping) +
                                 " of its mean diagonal; expected X^T X of finite activations");
    }
    damping += std::max(2 * g.options.damping, 0.01);
    RETURN_IF_ERROR(queue_factor(lane, w, g, damping));
  }
}

// Rotated weights and feedback factors of all members that have weights.
Status factorise(int device, GroupState& g) {
  const size_t size = static_cast<size_t>(g.k * g.n), square = static_cast<size_t>(g.k * g.k);
  std::vector<size_t> members;
  for (size_t m = 0; m < g.work.size(); ++m) {
    if (!g.work[m].scales.is_zero) members.push_back(m);
  }
  std::vector<FactorLane> lanes;
  for (size_t i = 0; i < std::min(kFactorsAtOnce, members.size()); ++i) {
    ASSIGN_OR_RETURN(device::Stream stream, device::Stream::create(device));
    ASSIGN_OR_RETURN(DeviceArray<double> factor, DeviceArray<double>::allocate(device, square, "factor"));
    ASSIGN_OR_RETURN(DeviceArray<int> failed, DeviceArray<int>::allocate(device, 1, "flag"));
    lanes.push_back({std::move(stream), std::move(factor), std::move(failed)});
  }
  for (size_t first = 0; first < members.size(); first += lanes.size()) {
    const size_t n_queued = std::min(lanes.size(), members.size() - first);
    for (size_t i = 0; i < n_queued; ++i) {
      GroupWork& w = g.work[members[first + i]];
      FactorLane& lane = lanes[i];
      lane.stream.begin_step("quantizing " + w.name);
      ASSIGN_OR_RETURN(w.rotated, DeviceArray<double>::allocate(device, size, "rotated weight"));
      ASSIGN_OR_RETURN(w.error, DeviceArray<double>::allocate(device, size, "weight errors"));
      ASSIGN_OR_RETURN(w.feedback, DeviceArray<double>::allocate(device, square, "error feedback"));
      if (g.options.two_sided) {
        ASSIGN_OR_RETURN(w.corrected, DeviceArray<double>::allocate(device, size, "corrected errors"));
      }
      ASSIGN_OR_RETURN(w.trellis, DeviceArray<uint16_t>::allocate(device, g.results[members[first + i]].tensor.trellis.size(), "trellis"));
      RETURN_IF_ERROR(
          rotate_weight_on_device(lane.stream, w.weight.data(), w.su.data(), w.sv.data(), g.k, g.n, w.rotated.data()));
      RETURN_IF_ERROR(queue_factor(lane, w, g, g.results[members[first + i]].damping));
    }
    for (size_t i = 0; i < n_queued; ++i) {
      const size_t m = members[first + i];
      RETURN_IF_ERROR(finish_factor(lanes[i], g.work[m], g, g.results[m].damping));
      RETURN_IF_ERROR(lanes[i].stream.synchronize());
    }
  }
  return ok_status();
}

}  // namespace

Result<std::vector<QuantizedMatrix>> quantize_prepared_group(device::Stream& stream, PreparedGroup group,
                                                             GroupTimes* times) {
  GroupState& g = group.state();
  GroupTimes unused;
  GroupTimes& t = times != nullptr ? *times : unused;
  const size_t size = static_cast<size_t>(g.k * g.n);
  double start = seconds_now();
  RETURN_IF_ERROR(factorise(stream.device(), g));
  t.factor += seconds_now() - start;

  start = seconds_now();
  std::vector<LdlqMatrix> batch;
  for (GroupWork& w : g.work) {
    if (w.scales.is_zero) continue;
    batch.push_back({w.rotated.data(), w.error.data(), w.feedback.data(), w.trellis.data(), w.output_feedback.data(),
                     w.corrected.data()});
  }
  if (batch.empty()) return Result<std::vector<QuantizedMatrix>>(std::move(g.results));
  stream.begin_step("quantizing a group with " + g.work[0].name);
  RETURN_IF_ERROR(g.search.ldlq(stream, batch, g.k, g.n));
  RETURN_IF_ERROR(stream.synchronize());
  t.search += seconds_now() - start;
  ASSIGN_OR_RETURN(const int64_t n_float_tiles, g.search.count_float_tiles(stream));
  t.n_float_tiles += n_float_tiles;

  start = seconds_now();
  ASSIGN_OR_RETURN(const DeviceArray<double> scratch,
                   DeviceArray<double>::allocate(stream.device(), 2 * size, "products"));
  ASSIGN_OR_RETURN(const DeviceArray<float> decoded,
                   DeviceArray<float>::allocate(stream.device(), size, "decoded weight"));
  ASSIGN_OR_RETURN(const DeviceArray<double> rows,
                   DeviceArray<double>::allocate(stream.device(), static_cast<size_t>(4 * g.k), "sums"));
  ASSIGN_OR_RETURN(const DeviceArray<double> sums, DeviceArray<double>::allocate(stream.device(), 4, "sums"));
  for (size_t m = 0; m < g.work.size(); ++m) {
    GroupWork& w = g.work[m];
    if (w.scales.is_zero) continue;
    QuantizedMatrix& r = g.results[m];
    RETURN_IF_ERROR(decode_on_device(stream, w.rotated.data(), w.error.data(), w.su.data(), w.sv.data(), g.k, g.n,
                                     scratch.data(), decoded.data()));
    const double* h = w.hessian->use == HessianUse::kCalibrated ? w.hessian->values.data() : nullptr;
    RETURN_IF_ERROR(measure_on_device(stream, w.weight.data(), decoded.data(), h, g.k, g.n, scratch.data(), rows.data(),
                                      sums.data()));
    ASSIGN_OR_RETURN(const std::vector<double> s, sums.download(stream));
    r.relative_mse = s[3] > 0 ? s[2] / s[3] : 0.0;
    r.true_error = s[3] > 0 && h != nullptr ? (s[1] > 0 ? s[0] / s[1] : 0.0) : r.relative_mse;
    r.weighted_error = r.true_error;
    ASSIGN_OR_RETURN(r.tensor.trellis, w.trellis.download(stream));
  }
  t.measure += seconds_now() - start;
  return Result<std::vector<QuantizedMatrix>>(std::move(g.results));
}

Result<std::vector<QuantizedMatrix>> quantize_group_on_device(device::Stream& stream,
                                                              std::span<const GroupMember> members, int64_t k,
                                                              int64_t n, const QuantizeOptions& options,
                                                              ThreadPool& pool, GroupTimes* times) {
  if (times != nullptr) *times = GroupTimes();
  ASSIGN_OR_RETURN(PreparedGroup group, prepare_group(stream, members, k, n, options, pool, times));
  return quantize_prepared_group(stream, std::move(group), times);
}

}  // namespace espalier::codec
