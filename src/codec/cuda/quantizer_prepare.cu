// What a group needs before the device works on it: checks, Hessians, scales, feedback along the outputs, uploads.
#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>

#include "codec/block_ldl.h"
#include "codec/cuda/quantizer_group.h"
#include "codec/rotated_problem.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

using device::DeviceArray;

constexpr int kMaxRetries = 10;

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

// Feedback along the outputs: one small factor per 128 columns, made here.
Status factorise_outputs(device::Stream& stream, GroupWork& work, int64_t n, const QuantizeOptions& options, ThreadPool& pool) {
  const WeightScales& scales = work.scales;
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
        return failed_precondition(work.name + ": the output scales are too uneven to be factorised");
      damping += 0.01;
    }
    const std::vector<double> rows = block_ldl_feedback(factor.data(), kBlock, pool);
    feedback.insert(feedback.end(), rows.begin(), rows.end());
  }
  ASSIGN_OR_RETURN(work.output_feedback, DeviceArray<double>::upload(stream, feedback, "output feedback"));
  return stream.synchronize();
}

// Scales of all members, a thread each.
Status choose_all_scales(GroupState& g, std::span<const GroupMember> members, ThreadPool& pool) {
  const double spread = g.options.spread > 0 ? g.options.spread : best_spread(g.options.codebook, g.options.k2);
  std::vector<std::optional<Result<WeightScales>>> scales(members.size());
  pool.parallel_for(static_cast<int64_t>(members.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const GroupMember& member = members[static_cast<size_t>(m)];
      std::optional<Result<WeightScales>>& found = scales[static_cast<size_t>(m)];
      bool finite = true;
      for (int64_t i = 0; i < g.k * g.n; ++i) finite = finite && std::isfinite(member.weight[i]);
      if (!finite) {
        found = Result<WeightScales>(data_loss(member.name + ": a weight is not finite; check the checkpoint"));
        continue;
      }
      std::vector<double> diagonal(g.work[static_cast<size_t>(m)].hessian->diagonal);
      for (double& d : diagonal) d = std::max(d + g.options.damping, 1e-6);
      ScaleRequest request;
      request.weight = member.weight;
      request.k = g.k;
      request.n = g.n;
      request.diagonal = diagonal.data();
      request.spread = spread;
      request.rule = g.options.scale_rule;
      request.two_sided = g.options.two_sided;
      request.seed = g.options.seed;
      request.name = member.name;
      found = choose_scales(request);
    }
  });
  for (size_t m = 0; m < members.size(); ++m) {
    if (!scales[m]->ok()) return scales[m]->error();
    g.work[m].scales = std::move(*scales[m]).value();
  }
  return ok_status();
}

}  // namespace

PreparedGroup::PreparedGroup(std::unique_ptr<GroupState> state) : state_(std::move(state)) {}
PreparedGroup::~PreparedGroup() = default;
PreparedGroup::PreparedGroup(PreparedGroup&&) noexcept = default;
PreparedGroup& PreparedGroup::operator=(PreparedGroup&&) noexcept = default;

Result<PreparedGroup> prepare_group(device::Stream& stream, std::span<const GroupMember> members, int64_t k, int64_t n,
                                    const QuantizeOptions& options, ThreadPool& pool, GroupTimes* times) {
  RETURN_IF_ERROR(check_group(members, k, n, options));
  GroupTimes unused;
  GroupTimes& t = times != nullptr ? *times : unused;
  auto state = std::make_unique<GroupState>();
  GroupState& g = *state;
  g.k = k;
  g.n = n;
  g.options = options;
  const size_t size = static_cast<size_t>(k * n);

  double start = seconds_now();
  DeviceSearchOptions search_options;
  search_options.search.codebook = options.codebook;
  search_options.search.k2 = options.k2;
  search_options.search.n_cuts = options.n_cuts;
  // Single tiles for less work than multiprocessors, and where 128-column groups do not come in pairs.
  search_options.one_tile =
      static_cast<int64_t>(members.size()) * n / kTile < 264 || (options.two_sided && n % (2 * kBlock) != 0);
  ASSIGN_OR_RETURN(g.search, DeviceSearch::create(stream, search_options));
  g.work.resize(members.size());
  for (size_t m = 0; m < members.size(); ++m) {
    if (g.hessians.find(members[m].hessian) == g.hessians.end()) {
      ASSIGN_OR_RETURN(g.hessians[members[m].hessian],
                       use_hessian(stream, members[m].hessian, k, members[m].name, pool));
    }
    g.work[m].name = members[m].name;
    g.work[m].hessian = &g.hessians[members[m].hessian];
  }
  t.upload += seconds_now() - start;
  start = seconds_now();
  RETURN_IF_ERROR(choose_all_scales(g, members, pool));
  t.scales += seconds_now() - start;

  start = seconds_now();
  g.results.resize(members.size());
  for (size_t m = 0; m < members.size(); ++m) {
    GroupWork& w = g.work[m];
    QuantizedMatrix& r = g.results[m];
    r.hessian = w.hessian->use;
    r.damping = options.damping;
    r.n_zero_rows = w.scales.n_zero_rows;
    r.n_zero_columns = w.scales.n_zero_columns;
    r.tensor.k = k;
    r.tensor.n = n;
    r.tensor.k2 = options.k2;
    r.tensor.codebook = options.codebook;
    r.tensor.suh = w.scales.suh;
    r.tensor.svh = w.scales.svh;
    r.tensor.trellis.assign(static_cast<size_t>(trellis_words(k, n, options.k2)), 0);
    if (w.scales.is_zero) {
      const bool had_weights =
          std::any_of(members[m].weight, members[m].weight + k * n, [](float x) { return x != 0.0f; });
      r.true_error = r.relative_mse = r.weighted_error = had_weights ? 1.0 : 0.0;
      continue;
    }
    stream.begin_step("preparing " + w.name);
    std::vector<double> signed_su(w.scales.su);
    for (size_t i = 0; i < signed_su.size(); ++i) {
      if ((w.scales.suh[i] & 0x8000u) != 0) signed_su[i] = -signed_su[i];
    }
    const std::vector<double> su = decoded_scales(w.scales.suh), sv = decoded_scales(w.scales.svh);
    ASSIGN_OR_RETURN(w.weight,
                     DeviceArray<float>::upload(stream, std::span<const float>(members[m].weight, size), "weight"));
    ASSIGN_OR_RETURN(w.signed_su, DeviceArray<double>::upload(stream, signed_su, "row scales"));
    ASSIGN_OR_RETURN(w.su, DeviceArray<double>::upload(stream, su, "row scales"));
    ASSIGN_OR_RETURN(w.sv, DeviceArray<double>::upload(stream, sv, "column scales"));
    RETURN_IF_ERROR(stream.synchronize());
    if (options.two_sided) RETURN_IF_ERROR(factorise_outputs(stream, w, n, options, pool));
  }
  t.upload += seconds_now() - start;
  return PreparedGroup(std::move(state));
}

}  // namespace espalier::codec
