#include "stages/plan/dual.h"

#include <algorithm>
#include <cmath>

namespace espalier {
namespace {

// Relative accuracy of the dual's maximum.
constexpr double kAccuracy = 1e-10;
constexpr int kMaxSteps = 6000;

}  // namespace

Dual::Dual(const AllocationProblem& problem, const Hulls& hulls) : hulls_(hulls) {
  worst_ = hulls.floor;
  for (size_t i = 0; i < hulls.n_items(); ++i) {
    reads_.push_back(static_cast<double>(problem.items[i].reads));
    worst_ += hulls.weights[i] * hulls.at(i, 0).error;
  }
}

Dual::Point Dual::evaluate(const DualPrices& prices, const DualLimits& limits) {
  ++n_evaluations_;
  const size_t n = hulls_.n_items(), n_guards = hulls_.guards.size();
  Point out;
  out.guards.assign(n_guards, 0);
  for (size_t i = 0; i < n; ++i) {
    double weight = hulls_.weights[i];
    for (size_t g = 0; g < n_guards; ++g) weight += prices.guards[g] * hulls_.guard_weights[g * n + i];
    const double price = prices.storage + prices.reads * reads_[i];
    const HullPoint* point = &hulls_.points[hulls_.first[i]];
    const HullPoint* last = &hulls_.points[hulls_.first[i + 1] - 1];
    while (point != last && weight * point->slope > price) ++point;
    const auto size = static_cast<double>(point->half_bits);
    out.value += weight * point->error + price * size;
    out.storage += size;
    out.reads += reads_[i] * size;
    for (size_t g = 0; g < n_guards; ++g) out.guards[g] += hulls_.guard_weights[g * n + i] * point->error;
  }
  out.value += hulls_.floor - prices.storage * limits.storage - prices.reads * limits.reads;
  for (size_t g = 0; g < n_guards; ++g) out.value -= prices.guards[g] * limits.guards[g];
  return out;
}

std::vector<int> Dual::positions(const DualPrices& prices) const {
  const size_t n = hulls_.n_items();
  std::vector<int> out(n, 0);
  for (size_t i = 0; i < n; ++i) {
    double weight = hulls_.weights[i];
    for (size_t g = 0; g < hulls_.guards.size(); ++g) weight += prices.guards[g] * hulls_.guard_weights[g * n + i];
    const double price = prices.storage + prices.reads * reads_[i];
    size_t k = 0;
    while (k + 1 < hulls_.n_points(i) && weight * hulls_.at(i, k).slope > price) ++k;
    out[i] = static_cast<int>(k);
  }
  return out;
}

bool Dual::settle_storage(DualPrices& prices, const DualLimits& limits) {
  const auto fits = [&](double price) {
    prices.storage = price;
    return evaluate(prices, limits).storage <= limits.storage;
  };
  if (fits(0)) return true;
  double high = 0;
  for (size_t i = 0; i < hulls_.n_items(); ++i) {
    double weight = hulls_.weights[i];
    for (size_t g = 0; g < hulls_.guards.size(); ++g) weight += prices.guards[g] * hulls_.guard_weight(g, i);
    high = std::max(high, weight * hulls_.at(i, 0).slope);
  }
  if (!fits(high)) return false;
  double low = 0;
  while (true) {
    // In the logarithm first; a span of four and less is halved.
    const double middle =
        low * 4 < high ? (low > 0 ? std::sqrt(low) * std::sqrt(high) : high * 0x1p-16) : low + (high - low) / 2;
    if (!(middle > low && middle < high)) break;
    (fits(middle) ? high : low) = middle;
  }
  prices.storage = high;
  return true;
}

Dual::Best Dual::maximise(const DualLimits& limits) {
  Best best;
  best.prices.guards.assign(hulls_.guards.size(), 0);
  if (!settle_storage(best.prices, limits)) {
    best.is_infeasible = true;
    return best;
  }
  const Point alone = evaluate(best.prices, limits);
  best.value = alone.value;
  bool binds = limits.has_reads && alone.reads > limits.reads;
  for (size_t g = 0; g < hulls_.guards.size(); ++g) binds = binds || alone.guards[g] > limits.guards[g];
  if (!binds) return best;
  ellipsoid(limits, best);
  if (best.is_infeasible) return best;
  // One exact line search: the primal point then keeps the storage limit.
  DualPrices settled = best.prices;
  if (settle_storage(settled, limits)) {
    const double value = evaluate(settled, limits).value;
    if (value >= best.value - kAccuracy * std::abs(best.value)) {
      best.prices = settled;
      best.value = std::max(best.value, value);
    }
  }
  return best;
}

void Dual::ellipsoid(const DualLimits& limits, Best& best) {
  // Coordinates are prices times limits, so that all have the objective's unit: storage, reads, guards.
  const size_t n_guards = hulls_.guards.size();
  const size_t offset = limits.has_reads ? 2 : 1;
  const size_t m = offset + n_guards;
  const auto positive = [](double x) { return x > 0 ? x : 1.0; };
  std::vector<double> scale(m, 1);
  scale[0] = positive(limits.storage);
  if (limits.has_reads) scale[1] = positive(limits.reads);
  for (size_t g = 0; g < n_guards; ++g) scale[offset + g] = positive(limits.guards[g]);
  const double unit = std::max(worst_ - hulls_.floor, 1e-300);
  const double infeasible_above = worst_ + 1e-9 * std::abs(worst_);

  std::vector<double> y(m), centre(m), step(m), cut(m), p(m * m);
  DualPrices prices = best.prices;
  centre[0] = best.prices.storage * scale[0];
  double radius = unit;
  for (int attempt = 0; attempt < 14; ++attempt, radius *= 8) {
    y = centre;
    p.assign(m * m, 0);
    for (size_t j = 0; j < m; ++j) p[j * m + j] = radius * radius;
    std::vector<double> top = y;
    for (int k = 0; k < kMaxSteps; ++k) {
      const auto lowest = static_cast<size_t>(std::min_element(y.begin(), y.end()) - y.begin());
      double depth;  // the optimum lies in cut . (y' - y) + depth <= 0
      bool is_gradient = false;
      if (y[lowest] < 0) {
        cut.assign(m, 0);
        cut[lowest] = -1;
        depth = -y[lowest];
      } else {
        prices.storage = y[0] / scale[0];
        prices.reads = limits.has_reads ? y[1] / scale[1] : 0;
        for (size_t g = 0; g < n_guards; ++g) prices.guards[g] = y[offset + g] / scale[offset + g];
        const Point point = evaluate(prices, limits);
        if (point.value > best.value) {
          best.value = point.value;
          best.prices = prices;
          top = y;
        }
        if (point.value > infeasible_above) {
          best.is_infeasible = true;
          return;
        }
        cut[0] = -(point.storage - limits.storage) / scale[0];
        if (limits.has_reads) cut[1] = -(point.reads - limits.reads) / scale[1];
        for (size_t g = 0; g < n_guards; ++g)
          cut[offset + g] = -(point.guards[g] - limits.guards[g]) / scale[offset + g];
        depth = best.value - point.value;
        is_gradient = true;
      }
      double length = 0;
      for (size_t i = 0; i < m; ++i) {
        step[i] = 0;
        for (size_t j = 0; j < m; ++j) step[i] += p[i * m + j] * cut[j];
        length += cut[i] * step[i];
      }
      length = length > 0 ? std::sqrt(length) : 0;
      if (is_gradient && length <= kAccuracy * std::abs(best.value)) break;
      if (!(length > 0) || depth >= length) break;
      const auto n = static_cast<double>(m);
      const double alpha = depth / length;
      for (double& s : step) s /= length;
      for (size_t i = 0; i < m; ++i) y[i] -= (1 + n * alpha) / (n + 1) * step[i];
      const double grow = n * n * (1 - alpha * alpha) / (n * n - 1);
      const double shrink = 2 * (1 + n * alpha) / ((n + 1) * (1 + alpha));
      for (size_t i = 0; i < m; ++i) {
        for (size_t j = 0; j < m; ++j) p[i * m + j] = grow * (p[i * m + j] - shrink * step[i] * step[j]);
      }
    }
    // The best point may lie outside the first ball: look further when it is near its edge.
    double distance = 0;
    for (size_t j = 0; j < m; ++j) distance += (top[j] - centre[j]) * (top[j] - centre[j]);
    if (distance < 0.25 * radius * radius) return;
  }
}

}  // namespace espalier
