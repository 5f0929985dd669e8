#include "model/moe.h"

#include <algorithm>

#include "model/names.h"
#include "model/project.h"
#include "ops/parallel.h"
#include "ops/router.h"
#include "ops/swiglu.h"

namespace espalier {

Routing route(const CallContext& context, const MoeWeights& weights, const float* x, int64_t n_rows, int64_t n_active,
              int block) {
  const int64_t n_experts = weights.gate.out();
  const std::vector<float> logits = project(context, weights.gate, "", x, n_rows, Rounding::kNone);
  std::vector<float> scores(logits.size());
  Routing routing;
  routing.n_active = n_active;
  routing.ids.resize(static_cast<size_t>(n_rows * n_active));
  routing.weights.resize(static_cast<size_t>(n_rows * n_active));
  ops::RouterParams p;
  p.logits = logits.data();
  p.bias = weights.bias.data();
  p.scores = scores.data();
  p.ids = routing.ids.data();
  p.weights = routing.weights.data();
  p.n_rows = n_rows;
  p.n_experts = n_experts;
  p.n_active = n_active;
  p.temperature = static_cast<float>(context.config.gate_temp);
  p.scale = static_cast<float>(context.config.routed_scale);
  ops::router(context.pool, p);
  if (context.observer != nullptr) context.observer->value(block, "router.scores", scores.data(), n_rows, n_experts);
  return routing;
}

void expert_hidden(const CallContext& context, const ExpertWeights& expert, const float* x, int64_t n_rows,
                   const float* gate, float* z) {
  const int64_t d_ff = expert.w1.out();
  const std::vector<float> up = project(context, expert.w3, "", x, n_rows, Rounding::kActQuant);
  project(context, expert.w1, "", x, n_rows, Rounding::kActQuant, z);
  ops::swiglu(context.pool, {z, up.data(), gate, z, n_rows, d_ff, static_cast<float>(context.config.swiglu_limit)});
  round_if_vendor(context, z, n_rows * d_ff);
}

namespace {

// Rows routed to one expert, in ascending row order, with the place of each in the [n_rows, n_active] table.
struct ExpertRows {
  int32_t expert = 0;
  std::vector<int64_t> places;
};

std::vector<ExpertRows> group_by_expert(const Routing& routing, int64_t n_experts) {
  std::vector<ExpertRows> all(static_cast<size_t>(n_experts));
  for (size_t i = 0; i < routing.ids.size(); ++i)
    all[static_cast<size_t>(routing.ids[i])].places.push_back(static_cast<int64_t>(i));
  std::vector<ExpertRows> used;
  for (size_t e = 0; e < all.size(); ++e) {
    if (all[e].places.empty()) continue;
    all[e].expert = static_cast<int32_t>(e);
    used.push_back(std::move(all[e]));
  }
  // Long lists first, so that threads end together; outputs have fixed places, so the order does not matter.
  std::stable_sort(used.begin(), used.end(),
                   [](const ExpertRows& a, const ExpertRows& b) { return a.places.size() > b.places.size(); });
  return used;
}

// One expert's part of the rows: [first, first + n) of a list ordered by expert.
struct ExpertRange {
  const ExpertWeights* expert;
  int64_t first;
  int64_t n;
};

bool multiplies_integers(const ExpertWeights& expert) {
  return expert.w1.products() != Products::kExact && expert.w2.products() != Products::kExact &&
         expert.w3.products() != Products::kExact;
}

// All experts at once, in place of one after the other: in [n, D] with gate [n] -> out [n, D].
void run_experts_together(const CallContext& context, const std::vector<ExpertRange>& ranges, const float* in,
                          const float* gate, int64_t n, float* out) {
  const int64_t d = context.config.d_model;
  const int64_t d_ff = ranges.front().expert->w1.out();
  std::vector<float> z(static_cast<size_t>(n * d_ff));
  std::vector<float> up(static_cast<size_t>(n * d_ff));
  std::vector<Linear::Job> jobs;
  for (const ExpertRange& r : ranges) {
    jobs.push_back({&r.expert->w1, in + r.first * d, r.n, z.data() + r.first * d_ff});
    jobs.push_back({&r.expert->w3, in + r.first * d, r.n, up.data() + r.first * d_ff});
  }
  Linear::apply_all(context.pool, jobs);
  ops::swiglu(context.pool,
              {z.data(), up.data(), gate, z.data(), n, d_ff, static_cast<float>(context.config.swiglu_limit)});
  jobs.clear();
  for (const ExpertRange& r : ranges) {
    jobs.push_back({&r.expert->w2, z.data() + r.first * d_ff, r.n, out + r.first * d});
  }
  Linear::apply_all(context.pool, jobs);
}

}  // namespace

void run_moe(const CallContext& context, const MoeWeights& weights, int block, const float* x, int64_t n_rows,
             float* y) {
  const Config& c = context.config;
  const int64_t d = c.d_model;
  const int64_t n_active = block < c.n_layers ? c.n_active : c.drafter.n_active;
  const Routing routing = route(context, weights, x, n_rows, n_active, block);
  const std::string prefix = block_prefix(c, block);
  if (context.observer != nullptr) {
    context.observer->moe_input(prefix, x, n_rows, d, routing.ids.data(), routing.weights.data(), n_active);
  }

  CallContext quiet{c, context.engram_hashes, context.engram_token_map, context.numerics, context.pool, nullptr};
  std::vector<float> outputs(static_cast<size_t>(n_rows * n_active * d));  // [row, place, D]
  const std::vector<ExpertRows> used = group_by_expert(routing, weights.gate.out());
  const auto run_expert = [&](const ExpertRows& rows) {
    const ExpertWeights& expert = weights.experts[static_cast<size_t>(rows.expert)];
    const int64_t n = static_cast<int64_t>(rows.places.size());
    std::vector<float> in(static_cast<size_t>(n * d));
    std::vector<float> gate(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t place = rows.places[static_cast<size_t>(i)];
      std::copy_n(x + place / n_active * d, d, in.data() + i * d);
      gate[static_cast<size_t>(i)] = routing.weights[static_cast<size_t>(place)];
    }
    std::vector<float> z(static_cast<size_t>(n * expert.w1.out()));
    expert_hidden(quiet, expert, in.data(), n, gate.data(), z.data());
    project(quiet, expert.w2, "", z.data(), n, Rounding::kActQuant, in.data());
    for (int64_t i = 0; i < n; ++i)
      std::copy_n(in.data() + i * d, d, outputs.data() + rows.places[static_cast<size_t>(i)] * d);
  };
  const bool together = context.numerics != Numerics::kVendor && !used.empty() &&
                        std::all_of(used.begin(), used.end(), [&](const ExpertRows& rows) {
                          return multiplies_integers(weights.experts[static_cast<size_t>(rows.expert)]);
                        });
  const double work = 3.0 * static_cast<double>(n_rows * n_active * d * c.d_ff);
  if (together) {
    const int64_t n = n_rows * n_active;
    std::vector<float> in(static_cast<size_t>(n * d)), out(static_cast<size_t>(n * d)), gate(static_cast<size_t>(n));
    std::vector<ExpertRange> ranges;
    std::vector<int64_t> places;
    for (const ExpertRows& rows : used) {
      ranges.push_back({&weights.experts[static_cast<size_t>(rows.expert)], static_cast<int64_t>(places.size()),
                        static_cast<int64_t>(rows.places.size())});
      places.insert(places.end(), rows.places.begin(), rows.places.end());
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t place = places[static_cast<size_t>(i)];
      std::copy_n(x + place / n_active * d, d, in.data() + i * d);
      gate[static_cast<size_t>(i)] = routing.weights[static_cast<size_t>(place)];
    }
    run_experts_together(context, ranges, in.data(), gate.data(), n, out.data());
    for (int64_t i = 0; i < n; ++i) std::copy_n(out.data() + i * d, d, outputs.data() + places[static_cast<size_t>(i)] * d);
  } else if (work > 4e6) {
    context.pool.parallel_for(static_cast<int64_t>(used.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run_expert(used[static_cast<size_t>(i)]);
    });
  } else {
    for (const ExpertRows& rows : used) run_expert(rows);
  }
  if (context.observer != nullptr) context.observer->expert_outputs(prefix, outputs.data(), n_rows, n_active, d);

  std::vector<float> z(static_cast<size_t>(n_rows * weights.shared.w1.out()));
  if (context.observer != nullptr) {
    context.observer->linear_input(prefix + "ffn.shared_experts.w1", x, n_rows, d);
    context.observer->linear_input(prefix + "ffn.shared_experts.w3", x, n_rows, d);
  }
  expert_hidden(quiet, weights.shared, x, n_rows, nullptr, z.data());
  const std::vector<float> shared =
      project(context, weights.shared.w2, prefix + "ffn.shared_experts.w2", z.data(), n_rows, Rounding::kActQuant);
  ops::for_rows(context.pool, n_rows, static_cast<double>(n_active * d), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* out = y + t * d;
      std::fill_n(out, d, 0.0f);
      for (int64_t i = 0; i < n_active; ++i) {
        const float* e = outputs.data() + (t * n_active + i) * d;
        for (int64_t j = 0; j < d; ++j) out[j] += e[j];
      }
      for (int64_t j = 0; j < d; ++j) out[j] += shared[static_cast<size_t>(t * d + j)];
    }
  });
  round_if_vendor(context, y, n_rows * d);
}

}  // namespace espalier
