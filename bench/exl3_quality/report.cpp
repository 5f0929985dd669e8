#include "bench/exl3_quality/report.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/peer/compare.h"
#include "format/json.h"

namespace espalier::quality {
namespace {

std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

// Difference of KL sums per scored position, peer - arm.
peer::PairedDifference compare_kl(const PanelScores& peer, const PanelScores& arm) {
  std::vector<double> theirs, ours, positions;
  for (const ScoreSums& row : peer.rows) theirs.push_back(row.kl);
  for (const ScoreSums& row : arm.rows) {
    ours.push_back(row.kl);
    positions.push_back(static_cast<double>(row.positions));
  }
  return peer::paired_bootstrap(theirs, ours, positions);
}

// Arms with a seed are measured against the peer of the same seed, others against seed 0's.
const ArmResult* peer_of(const Report& report, const ArmResult& arm) {
  const size_t at = arm.arm.find('@');
  const std::string wanted = "peer" + (at == std::string::npos ? "" : arm.arm.substr(at));
  for (const std::string& name : {wanted, std::string("peer")}) {
    for (const ArmResult& other : report.arms) {
      if (other.k2 == arm.k2 && other.arm == name) return &other;
    }
  }
  return nullptr;
}

struct GoldenMeans {
  double restated, fast, best;
  const GoldenResult* worst;  // of the restatement
};

GoldenMeans golden_means(const std::vector<GoldenResult>& golden) {
  std::vector<double> restated, fast, best;
  const GoldenResult* worst = &golden.front();
  for (const GoldenResult& g : golden) {
    restated.push_back(g.restated / g.recorded);
    fast.push_back(g.fast / g.recorded);
    best.push_back(g.best / g.recorded);
    if (std::fabs(std::log(restated.back())) > std::fabs(std::log(worst->restated / worst->recorded))) worst = &g;
  }
  return {peer::geometric_mean(restated), peer::geometric_mean(fast), peer::geometric_mean(best), worst};
}

std::string golden_text(const Report& report) {
  std::string out = format(
      "\nGolden cases: true error, exllamav3 v1.4.1 recorded, and over it: restatement, ours (geometric mean of %d "
      "sign seeds)\n%-32s %11s %9s %7s %7s\n",
      report.golden_seeds, "case", "recorded", "restated", "fast", "best");
  for (const GoldenResult& g : report.golden) {
    out += format("%-32s %11.4e %9.4f %7.4f %7.4f\n", g.name.c_str(), g.recorded, g.restated / g.recorded,
                  g.fast / g.recorded, g.best / g.recorded);
  }
  const GoldenMeans m = golden_means(report.golden);
  out += format("%-32s %11s %9.4f %7.4f %7.4f   worst restated: %s %.4f\n", "geometric mean", "", m.restated, m.fast,
                m.best, m.worst->name.c_str(), m.worst->restated / m.worst->recorded);
  return out;
}

std::string error_text(const Report& report) {
  std::string out = "\nTrue error tr(E'HE)/tr(W'HW), routed Hessian as given, geometric mean over " +
                    std::to_string(report.matrices.size()) + " expert matrices; ratio, lower and worst against peer\n" +
                    format("%4s  %-12s %11s %7s %9s  %s\n", "K", "arm", "error", "ratio", "lower", "worst ratio");
  for (const ArmResult& arm : report.arms) {
    out += format("%4s  %-12s %11.5e", codec::width_text(arm.k2).c_str(), arm.arm.c_str(),
                  peer::geometric_mean(arm.true_errors));
    const ArmResult* peer = peer_of(report, arm);
    if (peer != nullptr && peer != &arm) {
      const peer::ErrorComparison c = peer::compare_errors(peer->true_errors, arm.true_errors);
      out += format(" %7.4f %4ld/%-4zu  %.4f %s", c.ratio, static_cast<long>(c.n_lower), arm.true_errors.size(),
                    c.worst, report.matrices[c.worst_matrix].c_str());
    }
    if (arm.encode_seconds > 0) out += format("   (%.0f s)", arm.encode_seconds);
    out += "\n";
  }
  return out;
}

std::string kl_text(const Report& report) {
  std::string out;
  for (const ArmResult& arm : report.arms) {
    if (arm.panel.rows.empty()) continue;
    if (out.empty()) {
      const ScoreSums sums = arm.panel.total();
      out = format(
          "\nPanel KL(native || quantized), nats per position, kvq, %ld positions in %zu rows, native perplexity %.4f; "
          "difference "
          "peer - arm\nwith the 95 %% interval of %d paired resamples of rows\n%4s  %-12s %9s %8s %9s %7s  %s\n",
          static_cast<long>(sums.positions), arm.panel.rows.size(), sums.ppl_reference(), peer::kResamples, "K", "arm",
          "KL", "top-1 %", "ppl", "ratio", "difference [interval]");
    }
    const ScoreSums sums = arm.panel.total();
    out += format("%4s  %-12s %9.5f %8.2f %9.4f", codec::width_text(arm.k2).c_str(), arm.arm.c_str(), sums.kl_mean(),
                  100 * sums.top1(), sums.ppl_candidate());
    const ArmResult* peer = peer_of(report, arm);
    if (peer != nullptr && peer != &arm) {
      const peer::PairedDifference c = compare_kl(peer->panel, arm.panel);
      out +=
          format(" %7.4f  %+.5f [%+.5f, %+.5f]", sums.kl_mean() / peer->panel.total().kl_mean(), c.mean, c.low, c.high);
    }
    out += "\n";
  }
  return out;
}

struct Claim {
  bool errors = true, kl = true;
};

// Error of `best` lower at every width; KL lower at K = 2 and 3 with an interval that excludes zero.
Claim judge(const Report& report) {
  Claim claim;
  for (const ArmResult& arm : report.arms) {
    if (arm.arm != "best") continue;
    const ArmResult* peer = peer_of(report, arm);
    claim.errors =
        claim.errors && peer != nullptr && peer::compare_errors(peer->true_errors, arm.true_errors).ratio < 1;
    if (arm.k2 == 4 || arm.k2 == 6)
      claim.kl = claim.kl && peer != nullptr && compare_kl(peer->panel, arm.panel).low > 0;
  }
  return claim;
}

}  // namespace

std::string report_text(const Report& report) {
  std::string out =
      format("exl3_quality: %s, %d threads, %.0f s\n", report.machine.c_str(), report.n_threads, report.seconds);
  if (!report.golden.empty()) out += golden_text(report);
  if (report.arms.empty()) return out;
  out += format("\nCalibration: %ld rows, %ld tokens; panel: %ld rows; experts of %d layers replaced\n",
                static_cast<long>(report.calibration_rows), static_cast<long>(report.calibration_tokens),
                static_cast<long>(report.panel_rows), report.n_layers);
  out += report.identity + "\n";
  out += error_text(report) + kl_text(report);
  if (!report.is_complete)
    return out + "\nA trial run, not the primary comparison: rows, layers, widths or arms are missing.\n";
  const Claim claim = judge(report);
  return out + format(
                   "\nClaim (docs/decisions/exl3-primary-comparison.md): error lower at every width: %s; KL lower at K "
                   "= 2 and 3: %s\n",
                   claim.errors ? "holds" : "DOES NOT HOLD", claim.kl ? "holds" : "DOES NOT HOLD");
}

std::string report_json(const Report& report) {
  Json doc;
  doc["schema"] = "espalier-exl3-quality-1";
  doc["machine"] = report.machine;
  doc["threads"] = report.n_threads;
  doc["seconds"] = report.seconds;
  doc["identity"] = report.identity;
  doc["calibration_rows"] = report.calibration_rows;
  doc["panel_rows"] = report.panel_rows;
  doc["layers"] = report.n_layers;
  doc["complete"] = report.is_complete;
  if (!report.golden.empty()) {
    const GoldenMeans m = golden_means(report.golden);
    doc["golden"] = {{"restated", m.restated}, {"fast", m.fast}, {"best", m.best}, {"seeds", report.golden_seeds}};
    for (const GoldenResult& g : report.golden) {
      doc["golden"]["cases"].push_back(
          {{"name", g.name}, {"recorded", g.recorded}, {"restated", g.restated}, {"fast", g.fast}, {"best", g.best}});
    }
  }
  doc["arms"] = Json::array();
  for (const ArmResult& arm : report.arms) {
    Json a = {{"arm", arm.arm},
              {"bits", arm.k2 / 2.0},
              {"true_error", peer::geometric_mean(arm.true_errors)},
              {"digest", arm.digest},
              {"encode_seconds", arm.encode_seconds}};
    const ArmResult* peer = peer_of(report, arm);
    const bool has_peer = peer != nullptr && peer != &arm;
    if (has_peer) {
      const peer::ErrorComparison c = peer::compare_errors(peer->true_errors, arm.true_errors);
      a["error_ratio"] = c.ratio;
      a["n_lower"] = c.n_lower;
      a["worst_ratio"] = c.worst;
      a["worst_matrix"] = report.matrices[c.worst_matrix];
    }
    if (!arm.panel.rows.empty()) {
      const ScoreSums sums = arm.panel.total();
      a["kl"] = sums.kl_mean();
      a["top1"] = sums.top1();
      a["ppl"] = sums.ppl_candidate();
      a["positions"] = sums.positions;
      if (has_peer) {
        const peer::PairedDifference c = compare_kl(peer->panel, arm.panel);
        a["kl_difference"] = {{"mean", c.mean}, {"low", c.low}, {"high", c.high}};
      }
    }
    doc["arms"].push_back(std::move(a));
  }
  if (report.is_complete) {
    const Claim claim = judge(report);
    doc["claim"] = {{"errors", claim.errors}, {"kl", claim.kl}};
  }
  return dump_json(doc, 1);
}

}  // namespace espalier::quality
