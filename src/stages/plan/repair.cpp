#include "stages/plan/repair.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <queue>

namespace espalier {
namespace {

constexpr int kMaxPasses = 64;
constexpr int kMaxExchanges = 400;
constexpr size_t kPairs = 256;   // candidates on either side of a two-way exchange
constexpr size_t kTriples = 40;  // of a three-way exchange
// A guard is a sum of doubles: steps are taken with this much room, relative to the limit.
constexpr double kGuardRoom = 1e-12;

}  // namespace

Repair::Repair(const AllocationProblem& problem, const Hulls& hulls, const DualPrices& prices, const DualLimits& limits)
    : problem_(problem),
      hulls_(hulls),
      prices_(prices),
      storage_limit_(problem.storage_limit),
      has_reads_(limits.has_reads),
      read_limit_(0),
      guard_limits_(limits.guards) {
  // Tightened limits are below the problem's; the problem's own is an exact integer.
  if (has_reads_) {
    read_limit_ = limits.reads >= static_cast<double>(*problem.read_limit) ? *problem.read_limit
                                                                           : static_cast<ReadBits>(limits.reads);
  }
  for (double& g : guard_limits_) g -= kGuardRoom * std::abs(g);
  smallest_step_ = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < hulls.n_items(); ++i) {
    for (size_t k = 1; k < hulls.n_points(i); ++k) {
      smallest_step_ = std::min(smallest_step_, hulls.at(i, k).half_bits - hulls.at(i, k - 1).half_bits);
    }
  }
}

Repair::Move Repair::move(size_t item, int to) const {
  const HullPoint& from = hulls_.at(item, static_cast<size_t>(positions_[item]));
  const HullPoint& target = hulls_.at(item, static_cast<size_t>(to));
  Move m;
  m.item = item;
  m.to = to;
  m.half_bits = target.half_bits - from.half_bits;
  m.reads = static_cast<ReadBits>(problem_.items[item].reads) * m.half_bits;
  const double error = target.error - from.error;
  m.objective = hulls_.weights[item] * error;
  m.cost =
      m.objective + prices_.storage * static_cast<double>(m.half_bits) + prices_.reads * static_cast<double>(m.reads);
  for (size_t g = 0; g < hulls_.guards.size(); ++g) m.cost += prices_.guards[g] * hulls_.guard_weight(g, item) * error;
  return m;
}

double Repair::guard_change(size_t guard, const Move& m) const {
  const double error = hulls_.at(m.item, static_cast<size_t>(m.to)).error -
                       hulls_.at(m.item, static_cast<size_t>(positions_[m.item])).error;
  return hulls_.guard_weight(guard, m.item) * error;
}

double Repair::excess(const Move* a, const Move* b, const Move* c) const {
  int64_t half_bits = half_bits_;
  ReadBits reads = reads_;
  for (const Move* m : {a, b, c}) {
    if (m == nullptr) continue;
    half_bits += m->half_bits;
    reads += m->reads;
  }
  double out = 0;
  if (half_bits > storage_limit_) {
    out += static_cast<double>(half_bits - storage_limit_) / static_cast<double>(std::max<int64_t>(storage_limit_, 1));
  }
  if (has_reads_ && reads > read_limit_) {
    out += static_cast<double>(reads - read_limit_) / std::max(static_cast<double>(read_limit_), 1.0);
  }
  for (size_t g = 0; g < guards_.size(); ++g) {
    double kl = guards_[g];
    for (const Move* m : {a, b, c}) {
      if (m != nullptr) kl += guard_change(g, *m);
    }
    const double over = kl - guard_limits_[g];
    if (over > 0) out += over / std::max(std::abs(guard_limits_[g]), 1e-300);
  }
  return out;
}

void Repair::apply(const Move& m) {
  for (size_t g = 0; g < guards_.size(); ++g) guards_[g] += guard_change(g, m);
  half_bits_ += m.half_bits;
  reads_ += m.reads;
  objective_ += m.objective;
  positions_[m.item] = m.to;
}

void Repair::set(const std::vector<int>& positions) {
  positions_ = positions;
  half_bits_ = 0;
  reads_ = 0;
  objective_ = hulls_.floor;
  guards_.assign(hulls_.guards.size(), 0);
  for (size_t i = 0; i < positions.size(); ++i) {
    const HullPoint& p = hulls_.at(i, static_cast<size_t>(positions[i]));
    half_bits_ += p.half_bits;
    reads_ += static_cast<ReadBits>(problem_.items[i].reads) * p.half_bits;
    objective_ += hulls_.weights[i] * p.error;
    for (size_t g = 0; g < guards_.size(); ++g) guards_[g] += hulls_.guard_weight(g, i) * p.error;
  }
}

bool Repair::run(std::vector<int>& positions) {
  set(positions);
  if (!make_feasible()) return false;
  fill();
  exchange();
  positions = positions_;
  return true;
}

bool Repair::make_feasible() {
  struct Ranked {
    Move move;
    double rate;
  };
  for (int pass = 0; pass < kMaxPasses; ++pass) {
    const double before = excess(nullptr, nullptr, nullptr);
    if (before <= 0) return true;
    std::vector<Ranked> moves;
    for (size_t i = 0; i < positions_.size(); ++i) {
      std::optional<Ranked> best;
      for (const int direction : {-1, 1}) {
        const int to = positions_[i] + direction;
        if (to < 0 || to >= static_cast<int>(hulls_.n_points(i))) continue;
        const Move m = move(i, to);
        const double saved = before - excess(&m, nullptr, nullptr);
        if (!(saved > 0)) continue;
        const Ranked ranked{m, (std::max(m.cost, 0.0) + 1e-300) / saved};
        if (!best || ranked.rate < best->rate) best = ranked;
      }
      if (best) moves.push_back(*best);
    }
    if (moves.empty()) {
      // Limits pull in opposite directions: one step up and one down together.
      if (!step_both_ways(before)) return false;
      continue;
    }
    std::stable_sort(moves.begin(), moves.end(), [](const Ranked& a, const Ranked& b) { return a.rate < b.rate; });
    double now = before;
    for (const Ranked& r : moves) {
      const double after = excess(&r.move, nullptr, nullptr);
      if (!(after < now)) continue;
      apply(r.move);
      now = after;
      if (now <= 0) break;
    }
    if (!(now < before) && !step_both_ways(before)) return false;
  }
  return excess(nullptr, nullptr, nullptr) <= 0;
}

bool Repair::step_both_ways(double before) {
  const std::vector<Move> up = cheapest(1, kPairs), down = cheapest(-1, kPairs);
  const Move* best[2] = {nullptr, nullptr};
  double best_rate = std::numeric_limits<double>::infinity();
  for (const Move& a : up) {
    for (const Move& b : down) {
      if (a.item == b.item) continue;
      const double saved = before - excess(&a, &b, nullptr);
      const double rate = (std::max(a.cost, 0.0) + std::max(b.cost, 0.0) + 1e-300) / saved;
      if (saved > 0 && rate < best_rate) {
        best_rate = rate;
        best[0] = &a, best[1] = &b;
      }
    }
  }
  if (best[0] == nullptr) return false;
  apply(*best[0]);
  apply(*best[1]);
  return true;
}

void Repair::fill() {
  if (storage_limit_ - half_bits_ < smallest_step_) return;
  struct Step {
    double rate;
    size_t item;
    int to;
    // The largest rate first, then the lowest item: a fixed order.
    bool operator<(const Step& o) const { return rate != o.rate ? rate < o.rate : item > o.item; }
  };
  std::priority_queue<Step> steps;
  const auto offer = [&](size_t item) {
    const int to = positions_[item] + 1;
    if (to >= static_cast<int>(hulls_.n_points(item))) return;
    const Move m = move(item, to);
    if (!(m.objective < 0) || !fits(&m, nullptr, nullptr)) return;
    const double price = m.cost - m.objective;
    steps.push({-m.objective / std::max(price, 1e-300), item, to});
  };
  for (size_t i = 0; i < positions_.size(); ++i) offer(i);
  while (!steps.empty()) {
    const Step step = steps.top();
    steps.pop();
    const Move m = move(step.item, step.to);
    if (!fits(&m, nullptr, nullptr)) continue;  // room only shrinks: never again
    apply(m);
    offer(step.item);
  }
}

std::vector<Repair::Move> Repair::cheapest(int direction, size_t count) const {
  std::vector<Move> out;
  for (size_t i = 0; i < positions_.size(); ++i) {
    const int to = positions_[i] + direction;
    if (to < 0 || to >= static_cast<int>(hulls_.n_points(i))) continue;
    out.push_back(move(i, to));
  }
  const auto less = [](const Move& a, const Move& b) { return a.cost != b.cost ? a.cost < b.cost : a.item < b.item; };
  if (out.size() > count) {
    std::nth_element(out.begin(), out.begin() + static_cast<ptrdiff_t>(count), out.end(), less);
    out.resize(count);
  }
  std::sort(out.begin(), out.end(), less);
  return out;
}

void Repair::exchange() {
  for (int round = 0; round < kMaxExchanges; ++round) {
    const double enough = -1e-14 * std::abs(objective_);
    const std::vector<Move> up = cheapest(1, kPairs), down = cheapest(-1, kPairs);
    const Move* best[3] = {nullptr, nullptr, nullptr};
    double best_change = enough;
    const auto consider = [&](const Move* a, const Move* b, const Move* c) {
      const double change = a->objective + b->objective + (c == nullptr ? 0 : c->objective);
      if (!(change < best_change) || !fits(a, b, c)) return;
      best[0] = a, best[1] = b, best[2] = c;
      best_change = change;
    };
    for (const Move& a : up) {
      for (const Move& b : down) {
        if (a.item != b.item) consider(&a, &b, nullptr);
      }
    }
    if (best[0] == nullptr) {
      const auto triples = [&](const std::vector<Move>& ones, const std::vector<Move>& twos) {
        for (size_t i = 0; i < std::min(ones.size(), kTriples); ++i) {
          for (size_t j = 0; j < std::min(twos.size(), kTriples); ++j) {
            if (ones[i].item == twos[j].item) continue;
            for (size_t k = j + 1; k < std::min(twos.size(), kTriples); ++k) {
              if (ones[i].item != twos[k].item) consider(&ones[i], &twos[j], &twos[k]);
            }
          }
        }
      };
      triples(up, down);
      triples(down, up);
    }
    if (best[0] == nullptr) return;
    for (const Move* m : best) {
      if (m != nullptr) apply(*m);
    }
    ++n_exchanges_;
    fill();
  }
}

}  // namespace espalier
