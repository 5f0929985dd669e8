#include "codec/cuda/quantizer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>

#include "codec/block_ldl.h"
#include "codec/cuda/factor.h"
#include "codec/cuda/viterbi.h"
#include "codec/rotated_problem.h"
#include "codec/weight_scales.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

using device::DeviceArray;

constexpr int kMaxRetries = 10;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Status check_group(std::span<const GroupMember> members, int64_t k, int64_t n, const QuantizeOptions& options) {
  if (k <= 0 || n <= 0 || k % kBlock != 0 || n % kBlock != 0) {
    return failed_precondition("group of " + (members.empty() ? std::string("no matrices") : members[0].name) +
                               ": expected dimensions that are multiples of 128, found [" + std::to_string(k) + ", " +
                               std::to_string(n) + "]");
  }
  const std::pair<bool, const char*> only_cpu[] = {
      {options.refit_rounds != 0, "refit_rounds"},
      {options.descent_sweeps != 0, "descent_sweeps"},
      {options.n_draws != 1, "n_draws"},
      {options.spread_tiles != 0, "spread_tiles"},
      {options.output.diagonal != nullptr || options.output.full != nullptr, "output"}};
  for (const auto& [asked, option] : only_cpu) {
    if (asked)
      return unimplemented("quantizing on a GPU: the option " + std::string(option) +
                           "; leave it out or quantize on the CPU");
  }
  return ok_status();
}

// A Hessian, symmetric and with mean diagonal 1, here and on the device; the identity when there is none.
struct UsedHessian {
  HessianUse use = HessianUse::kNone;
  std::vector<double> diagonal;  // undamped
  DeviceArray<double> values;
};

Result<UsedHessian> use_hessian(device::Stream& stream, const double* hessian, int64_t k, const std::string& name,
                                ThreadPool& pool) {
  UsedHessian used;
  double largest = 0, mean = 0;
  if (hessian != nullptr) {
    std::vector<uint8_t> bad(static_cast<size_t>(k));
    pool.parallel_for(k, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        bool fine = hessian[i * k + i] >= 0;
        for (int64_t j = 0; j < k; ++j) fine = fine && std::isfinite(hessian[i * k + j]);
        bad[static_cast<size_t>(i)] = fine ? 0 : 1;
      }
    });
    const auto row = std::find(bad.begin(), bad.end(), 1);
    if (row != bad.end()) {
      return data_loss(name + ": Hessian row " + std::to_string(row - bad.begin()) +
                       " has a number that is not finite or a negative diagonal");
    }
    for (int64_t i = 0; i < k; ++i) largest = std::max(largest, hessian[i * k + i]);
  }
  used.use = hessian == nullptr ? HessianUse::kNone : largest > 0 ? HessianUse::kCalibrated : HessianUse::kEmpty;
  for (int64_t i = 0; i < k && used.use == HessianUse::kCalibrated; ++i)
    mean += hessian[i * k + i] / largest / static_cast<double>(k);
  std::vector<double> h(static_cast<size_t>(k * k));
  pool.parallel_for(k, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double* to = h.data() + i * k;
      if (used.use != HessianUse::kCalibrated) {
        to[i] = 1.0;
        continue;
      }
      for (int64_t j = 0; j < k; ++j) {
        to[j] = 0.5 * (hessian[i * k + j] / largest / mean + hessian[j * k + i] / largest / mean);
      }
    }
  });
  for (int64_t i = 0; i < k; ++i) used.diagonal.push_back(h[static_cast<size_t>(i * k + i)]);
  ASSIGN_OR_RETURN(used.values, DeviceArray<double>::upload(stream, h, "Hessian"));
  RETURN_IF_ERROR(stream.synchronize());
  return Result<UsedHessian>(std::move(used));
}

std::vector<double> decoded_scales(const std::vector<uint16_t>& scales) {
  std::vector<double> out;
  for (uint16_t s : scales) out.push_back(decode_f16(s));
  return out;
}

// One member on its way.
struct Work {
  std::optional<Result<WeightScales>> scales;
  UsedHessian* hessian = nullptr;
  DeviceArray<float> weight;
  DeviceArray<double> su, sv, rotated, error, feedback, output_feedback, corrected;
  DeviceArray<uint16_t> trellis;
};

// Feedback factors of one member; raises the damping until the Hessian can be factorised.
Status factorise(device::Stream& stream, Work& work, int64_t k, const QuantizeOptions& options, const std::string& name,
                 DeviceArray<double>& factor, DeviceArray<int>& failed, double& damping) {
  const WeightScales& scales = work.scales->value();
  std::vector<double> signed_su(scales.su);
  for (size_t i = 0; i < signed_su.size(); ++i) {
    if ((scales.suh[i] & 0x8000u) != 0) signed_su[i] = -signed_su[i];
  }
  ASSIGN_OR_RETURN(const DeviceArray<double> su, DeviceArray<double>::upload(stream, signed_su, "row scales"));
  for (int retry = 0;; ++retry) {
    RETURN_IF_ERROR(
        rotate_hessian_on_device(stream, work.hessian->values.data(), su.data(), damping, k, factor.data()));
    RETURN_IF_ERROR(cholesky_on_device(stream, factor.data(), k, failed.data()));
    ASSIGN_OR_RETURN(const std::vector<int> flag, failed.download(stream));
    if (flag[0] == 0) break;
    if (retry == kMaxRetries) {
      return failed_precondition(name + ": the Hessian is not positive definite even with damping " +
                                 std::to_string(damping) +
                                 " of its mean diagonal; expected X^T X of finite activations");
    }
    damping += std::max(2 * options.damping, 0.01);
  }
  return block_ldl_feedback_on_device(stream, factor.data(), k, work.feedback.data());
}

// Feedback along the outputs: one small factor per 128 columns, made here.
Status factorise_outputs(device::Stream& stream, Work& work, int64_t k, int64_t n, const QuantizeOptions& options,
                         const std::string& name, ThreadPool& pool) {
  const WeightScales& scales = work.scales->value();
  std::vector<double> feedback;
  for (int64_t first = 0; first < n; first += kBlock) {
    std::vector<double> identity(static_cast<size_t>(kBlock * kBlock));
    for (int64_t j = 0; j < kBlock; ++j) identity[static_cast<size_t>(j * kBlock + j)] = 1.0;
    const auto part = [&](const auto& v) {
      return std::decay_t<decltype(v)>(v.begin() + first, v.begin() + first + kBlock);
    };
    double damping = 0;
    std::vector<double> factor;
    for (int retry = 0;; ++retry) {
      factor = rotate_metric(identity, damping, part(scales.sv), part(scales.svh), pool);
      if (cholesky_upper(factor.data(), kBlock, pool, options.tier)) break;
      if (retry == kMaxRetries)
        return failed_precondition(name + ": the output scales are too uneven to be factorised");
      damping += 0.01;
    }
    const std::vector<double> rows = block_ldl_feedback(factor.data(), kBlock, pool);
    feedback.insert(feedback.end(), rows.begin(), rows.end());
  }
  ASSIGN_OR_RETURN(work.output_feedback, DeviceArray<double>::upload(stream, feedback, "output feedback"));
  ASSIGN_OR_RETURN(work.corrected,
                   DeviceArray<double>::allocate(stream.device(), static_cast<size_t>(k * n), "corrected errors"));
  return stream.synchronize();
}

}  // namespace

Result<std::vector<QuantizedMatrix>> quantize_group_on_device(device::Stream& stream,
                                                              std::span<const GroupMember> members, int64_t k,
                                                              int64_t n, const QuantizeOptions& options,
                                                              ThreadPool& pool, GroupTimes* times) {
  RETURN_IF_ERROR(check_group(members, k, n, options));
  GroupTimes unused;
  GroupTimes& t = times != nullptr ? *times : unused;
  t = GroupTimes();
  const size_t size = static_cast<size_t>(k * n);
  DeviceSearchOptions search_options;
  search_options.search.codebook = options.codebook;
  search_options.search.k2 = options.k2;
  search_options.search.n_cuts = options.n_cuts;
  // Single tiles for less work than multiprocessors, and where 128-column groups do not come in pairs.
  search_options.one_tile =
      static_cast<int64_t>(members.size()) * n / kTile < 264 || (options.two_sided && n % (2 * kBlock) != 0);
  ASSIGN_OR_RETURN(DeviceSearch search, DeviceSearch::create(stream, search_options));

  double start = now();
  std::map<const double*, UsedHessian> hessians;
  std::vector<Work> work(members.size());
  for (size_t m = 0; m < members.size(); ++m) {
    if (hessians.find(members[m].hessian) == hessians.end()) {
      ASSIGN_OR_RETURN(hessians[members[m].hessian], use_hessian(stream, members[m].hessian, k, members[m].name, pool));
    }
    work[m].hessian = &hessians[members[m].hessian];
  }
  t.upload += now() - start;
  start = now();
  const double spread = options.spread > 0 ? options.spread : best_spread(options.codebook, options.k2);
  pool.parallel_for(static_cast<int64_t>(members.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const GroupMember& member = members[static_cast<size_t>(m)];
      Work& w = work[static_cast<size_t>(m)];
      bool finite = true;
      for (int64_t i = 0; i < k * n; ++i) finite = finite && std::isfinite(member.weight[i]);
      if (!finite) {
        w.scales = Result<WeightScales>(data_loss(member.name + ": a weight is not finite; check the checkpoint"));
        continue;
      }
      std::vector<double> diagonal(w.hessian->diagonal);
      for (double& d : diagonal) d = std::max(d + options.damping, 1e-6);
      ScaleRequest request;
      request.weight = member.weight;
      request.k = k;
      request.n = n;
      request.diagonal = diagonal.data();
      request.spread = spread;
      request.rule = options.scale_rule;
      request.two_sided = options.two_sided;
      request.seed = options.seed;
      request.name = member.name;
      w.scales = choose_scales(request);
    }
  });
  t.scales += now() - start;

  std::vector<QuantizedMatrix> results(members.size());
  std::vector<LdlqMatrix> batch;
  start = now();
  ASSIGN_OR_RETURN(DeviceArray<double> factor,
                   DeviceArray<double>::allocate(stream.device(), static_cast<size_t>(k * k), "factor"));
  ASSIGN_OR_RETURN(DeviceArray<int> failed, DeviceArray<int>::allocate(stream.device(), 1, "flag"));
  for (size_t m = 0; m < members.size(); ++m) {
    Work& w = work[m];
    if (!w.scales->ok()) return w.scales->error();
    const WeightScales& scales = w.scales->value();
    QuantizedMatrix& r = results[m];
    r.hessian = w.hessian->use;
    r.damping = options.damping;
    r.n_zero_rows = scales.n_zero_rows;
    r.n_zero_columns = scales.n_zero_columns;
    r.tensor.k = k;
    r.tensor.n = n;
    r.tensor.k2 = options.k2;
    r.tensor.codebook = options.codebook;
    r.tensor.suh = scales.suh;
    r.tensor.svh = scales.svh;
    r.tensor.trellis.assign(static_cast<size_t>(trellis_words(k, n, options.k2)), 0);
    if (scales.is_zero) {
      const bool had_weights =
          std::any_of(members[m].weight, members[m].weight + k * n, [](float x) { return x != 0.0f; });
      r.true_error = r.relative_mse = r.weighted_error = had_weights ? 1.0 : 0.0;
      continue;
    }
    stream.begin_step("quantizing " + members[m].name);
    const std::vector<double> su = decoded_scales(scales.suh), sv = decoded_scales(scales.svh);
    ASSIGN_OR_RETURN(w.weight,
                     DeviceArray<float>::upload(stream, std::span<const float>(members[m].weight, size), "weight"));
    ASSIGN_OR_RETURN(w.su, DeviceArray<double>::upload(stream, su, "row scales"));
    ASSIGN_OR_RETURN(w.sv, DeviceArray<double>::upload(stream, sv, "column scales"));
    ASSIGN_OR_RETURN(w.rotated, DeviceArray<double>::allocate(stream.device(), size, "rotated weight"));
    ASSIGN_OR_RETURN(w.error, DeviceArray<double>::allocate(stream.device(), size, "weight errors"));
    ASSIGN_OR_RETURN(w.feedback,
                     DeviceArray<double>::allocate(stream.device(), static_cast<size_t>(k * k), "error feedback"));
    ASSIGN_OR_RETURN(w.trellis, DeviceArray<uint16_t>::allocate(stream.device(), r.tensor.trellis.size(), "trellis"));
    RETURN_IF_ERROR(stream.synchronize());
    t.upload += now() - start;
    start = now();
    RETURN_IF_ERROR(factorise(stream, w, k, options, members[m].name, factor, failed, r.damping));
    RETURN_IF_ERROR(rotate_weight_on_device(stream, w.weight.data(), w.su.data(), w.sv.data(), k, n, w.rotated.data()));
    if (options.two_sided) RETURN_IF_ERROR(factorise_outputs(stream, w, k, n, options, members[m].name, pool));
    batch.push_back({w.rotated.data(), w.error.data(), w.feedback.data(), w.trellis.data(), w.output_feedback.data(),
                     w.corrected.data()});
    RETURN_IF_ERROR(stream.synchronize());
    t.factor += now() - start;
    start = now();
  }
  if (batch.empty()) return Result<std::vector<QuantizedMatrix>>(std::move(results));
  RETURN_IF_ERROR(search.ldlq(stream, batch, k, n));
  RETURN_IF_ERROR(stream.synchronize());
  t.search += now() - start;
  ASSIGN_OR_RETURN(t.n_float_tiles, search.count_float_tiles(stream));

  start = now();
  ASSIGN_OR_RETURN(const DeviceArray<double> scratch,
                   DeviceArray<double>::allocate(stream.device(), 2 * size, "products"));
  ASSIGN_OR_RETURN(const DeviceArray<float> decoded,
                   DeviceArray<float>::allocate(stream.device(), size, "decoded weight"));
  ASSIGN_OR_RETURN(const DeviceArray<double> rows,
                   DeviceArray<double>::allocate(stream.device(), static_cast<size_t>(4 * k), "sums"));
  ASSIGN_OR_RETURN(const DeviceArray<double> sums, DeviceArray<double>::allocate(stream.device(), 4, "sums"));
  for (size_t m = 0; m < members.size(); ++m) {
    Work& w = work[m];
    if (w.scales->value().is_zero) continue;
    QuantizedMatrix& r = results[m];
    RETURN_IF_ERROR(decode_on_device(stream, w.rotated.data(), w.error.data(), w.su.data(), w.sv.data(), k, n,
                                     scratch.data(), decoded.data()));
    const double* h = w.hessian->use == HessianUse::kCalibrated ? w.hessian->values.data() : nullptr;
    RETURN_IF_ERROR(
        measure_on_device(stream, w.weight.data(), decoded.data(), h, k, n, scratch.data(), rows.data(), sums.data()));
    ASSIGN_OR_RETURN(const std::vector<double> s, sums.download(stream));
    r.relative_mse = s[3] > 0 ? s[2] / s[3] : 0.0;
    r.true_error = s[3] > 0 && h != nullptr ? (s[1] > 0 ? s[0] / s[1] : 0.0) : r.relative_mse;
    r.weighted_error = r.true_error;
    ASSIGN_OR_RETURN(r.tensor.trellis, w.trellis.download(stream));
  }
  t.measure += now() - start;
  return Result<std::vector<QuantizedMatrix>>(std::move(results));
}

}  // namespace espalier::codec
