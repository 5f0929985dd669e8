#include "stages/swap_sensitivity.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "model/coverage.h"
#include "stages/plan/expert_errors.h"
#include "stages/swap_sides.h"

namespace espalier {
namespace {

struct Line {
  double floor = 0, slope = 0;
};

// Through one or two points (D, K). Where the line would begin below 0, the one of least squares through 0; where it would fall, a
// level one at the smaller K.
Line line_through(const std::vector<double>& d, const std::vector<double>& k) {
  double dd = 0, dk = 0;
  for (size_t i = 0; i < d.size(); ++i) dd += d[i] * d[i], dk += d[i] * k[i];
  const Line through_zero{0, dd > 0 ? dk / dd : 0};
  if (d.size() == 1 || d[0] == d[1]) return through_zero;
  const double slope = (k[1] - k[0]) / (d[1] - d[0]), floor = k[0] - slope * d[0];
  if (slope < 0) return {std::min(k[0], k[1]), 0};
  return floor < 0 ? through_zero : Line{floor, slope};
}

class Fit {
 public:
  // measured: layer by layer and then all of them, for each of `sides`.
  Fit(const Config& config, const RoutingStatistics& routing, const SwapMeasurement& measured, const std::vector<SwapSide>& sides)
      : config_(config),
        routing_(routing),
        measured_(measured),
        sides_(sides),
        n_packs_(sides.size()),
        n_layers_(static_cast<size_t>(config.n_layers)) {}

  // D [n_packs, n_layers, n_domains].
  Status predict(const ExpertErrors& errors, const std::vector<std::vector<ExpertWidths>>& widths) {
    const auto n_experts = static_cast<size_t>(config_.n_experts);
    const size_t n_domains = measured_.domains.size();
    distance_.assign(n_packs_ * n_layers_ * n_domains, 0);
    for (size_t d = 0; d < n_domains; ++d) {
      const auto at = std::find(routing_.domains.begin(), routing_.domains.end(), measured_.domains[d]);
      const auto column = static_cast<size_t>(at - routing_.domains.begin());
      for (size_t p = 0; p < n_packs_; ++p) {
        for (size_t l = 0; l < n_layers_; ++l) {
          double sum = 0;
          for (size_t e = 0; e < n_experts; ++e) {
            const size_t i = l * n_experts + e;
            sum += static_cast<double>(routing_.share[i * routing_.domains.size() + column]) * errors.expert_error(l, e, widths[sides_[p].pack][i]);
          }
          distance_[(p * n_layers_ + l) * n_domains + d] = sum * sides_[p].amplitude * sides_[p].amplitude;
        }
      }
      for (size_t l = 0; l < n_layers_ && n_packs_ == 2 && sides_[0].pack != sides_[1].pack; ++l) {
        if (distance(0, l, d) == distance(1, l, d)) {
          return failed_precondition("--swap-pack: the two packs have the same widths in layer " + std::to_string(l) +
                                     "; give packs of different widths");
        }
      }
    }
    return ok_status();
  }

  double distance(size_t pack, size_t layer, size_t domain) const {
    return distance_[(pack * n_layers_ + layer) * measured_.domains.size() + domain];
  }
  size_t layer_swap(size_t pack, size_t layer) const { return pack * (n_layers_ + 1) + layer; }
  size_t all_swap(size_t pack) const { return pack * (n_layers_ + 1) + n_layers_; }

  // Mean of a swap over rows that are drawn `times` each.
  double mean(size_t swap, size_t domain, const std::vector<int>& times) const {
    double sum = 0;
    int64_t positions = 0;
    const size_t n_rows = measured_.row_domain.size();
    for (size_t r = 0; r < n_rows; ++r) {
      if (static_cast<size_t>(measured_.row_domain[r]) != domain || times[r] == 0) continue;
      sum += times[r] * measured_.kl[swap * n_rows + r];
      positions += times[r] * measured_.row_positions[r];
    }
    return positions == 0 ? 0 : sum / static_cast<double>(positions);
  }

  Line layer_line(size_t layer, size_t domain, const std::vector<int>& times) const {
    std::vector<double> d, k;
    for (size_t p = 0; p < n_packs_; ++p) {
      d.push_back(distance(p, layer, domain));
      k.push_back(mean(layer_swap(p, layer), domain, times));
    }
    return line_through(d, k);
  }

  // Floor and additivity of a domain, from the exchange of all layers.
  Line domain_line(size_t domain, const std::vector<Line>& layers, const std::vector<int>& times) const {
    std::vector<double> d, k;
    for (size_t p = 0; p < n_packs_; ++p) {
      double sum = 0;
      for (size_t l = 0; l < n_layers_; ++l) sum += layers[l].slope * distance(p, l, domain);
      d.push_back(sum);
      k.push_back(mean(all_swap(p), domain, times));
    }
    if (d.size() == 2 && d[0] == d[1]) return line_through({d[0]}, {k[0]});
    return line_through(d, k);
  }

 private:
  const Config& config_;
  const RoutingStatistics& routing_;
  const SwapMeasurement& measured_;
  const std::vector<SwapSide> sides_;
  const size_t n_packs_, n_layers_;
  std::vector<double> distance_;
};

// Shares so that slope * share * error is what exchanging the expert alone costs, its floor taken off.
void take_shares(const SwapMeasurement& m, const ExpertErrors& errors, const std::vector<std::vector<ExpertWidths>>& widths,
                 const Sensitivity& table, size_t first_swap, const Config& config, RoutingStatistics* routing) {
  const auto n_experts = static_cast<size_t>(config.n_experts);
  const size_t n_units = static_cast<size_t>(config.n_layers) * n_experts;
  for (size_t d = 0; d < m.domains.size(); ++d) {
    const auto at = std::find(routing->domains.begin(), routing->domains.end(), m.domains[d]);
    const auto column = static_cast<size_t>(at - routing->domains.begin());
    for (size_t i = 0; i < n_units; ++i) {
      std::vector<double> x, k;
      for (size_t p = 0; p < widths.size(); ++p) {
        x.push_back(errors.expert_error(i / n_experts, i % n_experts, widths[p][i]));
        k.push_back(m.mean(first_swap + p * n_units + i, d));
      }
      const double cost = x.size() == 2 && x[0] == x[1] ? 0 : line_through(x, k).slope;
      const double slope = table.layers[i / n_experts].slope[d];
      routing->share[i * routing->domains.size() + column] = slope > 0 ? static_cast<float>(cost / slope) : 0.0f;
    }
  }
}

}  // namespace

Result<std::vector<ExpertWidths>> expert_widths(const WeightLoader& pack) {
  const Config& config = pack.config();
  std::vector<ExpertWidths> out(static_cast<size_t>(config.n_layers * config.n_experts),
                                {kNativeWidth, kNativeWidth, kNativeWidth});
  for (const MatrixSpec& spec : all_matrices(config)) {
    if (spec.expert < 0 || spec.block >= config.n_layers) continue;
    const std::string stem = exl3_stem(pack.index(), spec);
    if (stem.empty()) continue;
    const std::optional<ConstView> trellis = pack.index().find(stem + ".trellis");
    const int k2 = static_cast<int>(trellis->shape[2] / 8);
    ExpertWidths& w = out[static_cast<size_t>(spec.block * config.n_experts + spec.expert)];
    (spec.kind == MatrixKind::kExpertW1 ? w.w1 : spec.kind == MatrixKind::kExpertW3 ? w.w3 : w.w2) = k2;
  }
  return out;
}

Result<SwapSensitivity> swap_sensitivity(const WeightLoader& native, const std::vector<const WeightLoader*>& packs,
                                         const RoutingStatistics& routing, const std::optional<MatrixErrors>& errors,
                                         const Dataset& data, const SwapSensitivityOptions& options, Progress& progress,
                                         ThreadPool& pool) {
  const Config& config = native.config();
  const auto n_layers = static_cast<size_t>(config.n_layers);
  for (const std::string& name : data.domains()) {
    if (std::find(routing.domains.begin(), routing.domains.end(), name) == routing.domains.end()) {
      return failed_precondition("the routing statistics have no domain '" + name + "', which the data set has; calibrate with the same domains");
    }
  }
  const std::vector<SwapSide> sides = swap_sides(options);
  std::vector<Swap> swaps = swaps_of_layers(sides, options, config.n_layers);
  const size_t first_expert_swap = swaps.size();
  for (int p = 0; p < static_cast<int>(packs.size()) && options.by_expert; ++p) {
    for (int l = 0; l < config.n_layers; ++l) {
      for (int e = 0; e < config.n_experts; ++e) swaps.push_back({p, l, e, false, std::nullopt});
    }
  }
  ASSIGN_OR_RETURN(SwapMeasurement measured, measure_swaps(native, packs, swaps, data, options.sweep, progress, pool));
  merge_sides(&measured, sides.size(), n_layers, options);

  SwapSensitivity out;
  out.routing = routing;
  Sensitivity& table = out.table;
  table.method = options.by_expert ? "swap by expert" : "swap";
  if (options.method == SensitivityMethod::kNoise) table.method = options.noise == NoiseShape::kShaped ? "noise" : "white noise";
  if (options.method == SensitivityMethod::kAround) table.method = "restored layers";
  const size_t n_domains = measured.domains.size(), n_rows = measured.row_domain.size();
  for (size_t d = 0; d < n_domains; ++d) {
    SensitivityDomain domain;
    domain.name = measured.domains[d];
    for (size_t r = 0; r < n_rows; ++r) {
      if (static_cast<size_t>(measured.row_domain[r]) != d) continue;
      domain.positions += measured.row_positions[r];
      ++domain.blocks;
    }
    table.domains.push_back(std::move(domain));
  }
  std::erase_if(table.domains, [](const SensitivityDomain& d) { return d.blocks == 0; });
  if (table.domains.size() != n_domains) return data_loss("a domain of the data set has no scored position; take its rows out");
  table.layers.resize(n_layers);
  for (LayerSensitivity& layer : table.layers) layer.floor = layer.slope = layer.slope_se = std::vector<double>(n_domains, 0);

  PlanInputs inputs{config, table, routing, errors};
  ASSIGN_OR_RETURN(const ExpertErrors expert_errors, ExpertErrors::make(inputs, PlanRequest()));
  std::vector<std::vector<ExpertWidths>> widths;
  for (const WeightLoader* pack : packs) {
    ASSIGN_OR_RETURN(auto of_pack, expert_widths(*pack));
    widths.push_back(std::move(of_pack));
  }
  Fit fit(config, routing, measured, sides);
  RETURN_IF_ERROR(fit.predict(expert_errors, widths));

  const std::vector<int> once(n_rows, 1);
  for (size_t d = 0; d < n_domains; ++d) {
    std::vector<Line> lines;
    for (size_t l = 0; l < n_layers; ++l) {
      lines.push_back(fit.layer_line(l, d, once));
      table.layers[l].floor[d] = lines.back().floor;
      // A layer whose restoring seems to cost is taken as one that costs nothing.
      table.layers[l].slope[d] = lines.back().slope = std::max(0.0, lines.back().slope);
    }
    const Line whole = fit.domain_line(d, lines, once);
    table.domains[d].floor = whole.floor;
    table.domains[d].additivity = whole.slope;
    if (options.method == SensitivityMethod::kAround) {
      if (!table.base) table.base.emplace();
      table.base->kl.push_back(fit.mean(fit.all_swap(0), d, once));
    }

    // Rows of the domain, drawn with replacement.
    std::vector<size_t> rows;
    for (size_t r = 0; r < n_rows; ++r) {
      if (static_cast<size_t>(measured.row_domain[r]) == d) rows.push_back(r);
    }
    const CounterRng rng(options.seed, "swap sensitivity, " + measured.domains[d]);
    std::vector<double> sum(n_layers, 0), square(n_layers, 0);
    for (int b = 0; b < options.resamples; ++b) {
      std::vector<int> times(n_rows, 0);
      for (size_t i = 0; i < rows.size(); ++i) {
        const double u = rng.uniform(static_cast<uint64_t>(b) * rows.size() + i);
        ++times[rows[std::min(rows.size() - 1, static_cast<size_t>(u * static_cast<double>(rows.size())))]];
      }
      for (size_t l = 0; l < n_layers; ++l) {
        const double slope = fit.layer_line(l, d, times).slope;
        sum[l] += slope, square[l] += slope * slope;
      }
    }
    for (size_t l = 0; l < n_layers && options.resamples > 1; ++l) {
      const double n = options.resamples, mean = sum[l] / n;
      table.layers[l].slope_se[d] = std::sqrt(std::max(0.0, square[l] / n - mean * mean));
    }
    for (size_t l = 0; l < n_layers; ++l) {
      for (size_t p = 0; p < sides.size(); ++p) {
        SwapKl& kl = table.layers[l].swaps[sides[p].name];
        kl.mean.push_back(std::max(0.0, fit.mean(fit.layer_swap(p, l), d, once)));
        double spread = 0;
        for (const size_t r : rows) {
          const double of_row = measured.kl[fit.layer_swap(p, l) * n_rows + r] - kl.mean.back() * static_cast<double>(measured.row_positions[r]);
          spread += of_row * of_row;
        }
        kl.se.push_back(std::sqrt(spread) / static_cast<double>(table.domains[d].positions));
      }
    }
  }

  out.blocks.domains = measured.domains;
  out.blocks.domain = measured.row_domain;
  for (const int64_t n : measured.row_positions) out.blocks.positions.push_back(static_cast<float>(n));
  for (size_t r = 0; r < n_rows; ++r) {
    std::vector<int> only(n_rows, 0);
    only[r] = 1;
    for (size_t l = 0; l < n_layers; ++l) {
      out.blocks.slope.push_back(static_cast<float>(fit.layer_line(l, static_cast<size_t>(measured.row_domain[r]), only).slope));
    }
  }
  for (LayerSensitivity& layer : table.layers) {
    if (options.method == SensitivityMethod::kNoise) layer.noise = layer.slope;
  }
  if (options.by_expert) take_shares(measured, expert_errors, widths, table, first_expert_swap, config, &out.routing);
  return out;
}

}  // namespace espalier
