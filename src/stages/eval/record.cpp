// The result record of an evaluation: sums and per-position arrays to one JSON document.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "format/json.h"
#include "stages/eval/eval.h"

namespace espalier {
namespace {

Json scores(const ScoreSums& sums, bool pair) {
  Json out;
  out["positions"] = sums.positions;
  if (pair) {
    out["kl_mean"] = sums.kl_mean();
    out["top1"] = sums.top1();
    out["ppl"] = sums.ppl_candidate();
    out["ppl_reference"] = sums.ppl_reference();
    out["delta_nll"] = (sums.nll_candidate - sums.nll_reference) / static_cast<double>(sums.positions);
  } else {
    out["ppl"] = sums.ppl_reference();
    out["nll_mean"] = sums.nll_reference / static_cast<double>(sums.positions);
  }
  return out;
}

Json kl_percentiles(const Sidecar& sidecar) {
  std::vector<double> kl(sidecar.kl.begin(), sidecar.kl.end());
  std::sort(kl.begin(), kl.end());
  Json out;
  out["min"] = kl.front();
  for (const auto& [name, fraction] : {std::pair<const char*, double>{"p01", 0.01},
                                       {"p05", 0.05},
                                       {"p10", 0.10},
                                       {"p50", 0.50},
                                       {"p90", 0.90},
                                       {"p95", 0.95},
                                       {"p99", 0.99},
                                       {"p999", 0.999}}) {
    out[name] = percentile(kl, fraction);
  }
  out["max"] = kl.back();
  return out;
}

Json confidence_buckets(const Sidecar& sidecar) {
  constexpr size_t kBuckets = std::size(kConfidenceEdges) + 1;
  std::vector<double> kl[kBuckets];
  int64_t same[kBuckets] = {};
  for (size_t i = 0; i < sidecar.kl.size(); ++i) {
    const auto b = static_cast<size_t>(confidence_bucket(sidecar.confidence[i]));
    kl[b].push_back(sidecar.kl[i]);
    same[b] += sidecar.same_top1[i];
  }
  Json out = Json::array();
  for (size_t b = 0; b < kBuckets; ++b) {
    Json bucket;
    bucket["from"] = b == 0 ? 0.0 : kConfidenceEdges[b - 1];
    bucket["to"] = b + 1 == kBuckets ? 1.0 : kConfidenceEdges[b];
    bucket["positions"] = kl[b].size();
    if (!kl[b].empty()) {
      const auto n = static_cast<double>(kl[b].size());
      double sum = 0;
      for (double x : kl[b]) sum += x;
      std::sort(kl[b].begin(), kl[b].end());
      bucket["kl_mean"] = sum / n;
      bucket["kl_median"] = percentile(kl[b], 0.5);
      bucket["top1"] = static_cast<double>(same[b]) / n;
    }
    out.push_back(std::move(bucket));
  }
  return out;
}

}  // namespace

std::string eval_record(const EvalResult& result, const EvalProvenance& provenance, int indent) {
  const bool pair = result.has_candidate;
  Json out;
  out["schema"] = "espalier-eval-1";
  out["what"] = pair ? "kl" : "ppl";
  if (pair) {
    out["kl_mean"] = result.total.kl_mean();
    out["kl_domain_mean"] = result.kl_domain_mean;
  }
  const Json total = scores(result.total, pair);
  for (const auto& [key, value] : total.items()) out[key] = value;
  out["rows"] = result.rows;
  out["unscored_rows"] = result.unscored_rows;
  out["domains"] = Json::object();
  for (const DomainScore& d : result.domains) {
    Json entry = scores(d.sums, pair);
    entry["rows"] = d.rows;
    out["domains"][d.name] = std::move(entry);
  }
  if (pair) {
    out["kl_percentiles"] = kl_percentiles(result.sidecar);
    const auto above = std::count_if(result.sidecar.kl.begin(), result.sidecar.kl.end(), [](float x) { return x > 1; });
    out["share_kl_above_1"] = static_cast<double>(above) / static_cast<double>(result.total.positions);
    out["confidence"] = confidence_buckets(result.sidecar);
  }
  out["provenance"] = {{"tool", provenance.tool},
                       {"reference", provenance.reference_id},
                       {"candidate", provenance.candidate_id},
                       {"panel_sha256", provenance.panel_sha256},
                       {"panel_content_sha256", provenance.panel_content_sha256},
                       {"panel_rows", provenance.panel_rows},
                       {"scored", "positions whose next token has role 1, 2 or 3"},
                       {"direction", "KL(reference || candidate), nats, temperature 1"},
                       {"numerics", numerics_name(provenance.options.numerics)},
                       {"products", products_name(provenance.options.products)},
                       {"batch", "one sequence per forward"},
                       {"chunk", provenance.options.chunk},
                       {"expert_pruning", "off"},
                       {"seconds", provenance.seconds}};
  return dump_json(out, indent);
}

std::string eval_report(const EvalResult& result, const EvalProvenance& provenance) {
  const bool pair = result.has_candidate;
  std::string out;
  char line[160];
  const auto add = [&](const std::string& name, const ScoreSums& s) {
    if (pair) {
      std::snprintf(line, sizeof line, "%-14s %9lld %10.5f %8.2f%% %10.4f %10.4f\n", name.c_str(),
                    static_cast<long long>(s.positions), s.kl_mean(), 100 * s.top1(), s.ppl_candidate(),
                    s.ppl_reference());
    } else {
      std::snprintf(line, sizeof line, "%-14s %9lld %10.4f\n", name.c_str(), static_cast<long long>(s.positions),
                    s.ppl_reference());
    }
    out += line;
  };
  if (pair)
    std::snprintf(line, sizeof line, "%-14s %9s %10s %9s %10s %10s\n", "domain", "positions", "KL", "top-1", "ppl",
                  "native ppl");
  else
    std::snprintf(line, sizeof line, "%-14s %9s %10s\n", "domain", "positions", "ppl");
  out += line;
  for (const DomainScore& d : result.domains) add(d.name, d.sums);
  add("all", result.total);
  if (pair) {
    std::snprintf(line, sizeof line, "mean of the domains' KL: %.5f\n", result.kl_domain_mean);
    out += line;
  }
  out += "KL in nats, native || candidate; numerics " + std::string(numerics_name(provenance.options.numerics)) +
         ", products " + std::string(products_name(provenance.options.products)) + "; panel sha256 " + provenance.panel_sha256.substr(0, 12) + "\n";
  return out;
}

void describe_sidecar(const EvalProvenance& provenance, Sidecar* sidecar) {
  sidecar->metadata["tool"] = provenance.tool;
  sidecar->metadata["reference"] = provenance.reference_id;
  sidecar->metadata["candidate"] = provenance.candidate_id;
  sidecar->metadata["panel_sha256"] = provenance.panel_sha256;
  sidecar->metadata["panel_content_sha256"] = provenance.panel_content_sha256;
  sidecar->metadata["numerics"] = std::string(numerics_name(provenance.options.numerics));
  sidecar->metadata["products"] = std::string(products_name(provenance.options.products));
  sidecar->metadata["chunk"] = std::to_string(provenance.options.chunk);
}

}  // namespace espalier
