// KL divergence and perplexity over a panel: one sequence per forward, both models through the same code with the same
// chunks.
//
// Logits are reduced chunk by chunk and never kept. Headline numbers are token-weighted means over scored positions;
// the mean of domain means stands beside them. Source: quality specification 4.1 - 4.3, 4.6. Formats:
// docs/formats/sidecar.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/dataset.h"
#include "model/loaded_model.h"
#include "model/numerics.h"
#include "model/products.h"
#include "stages/eval/sidecar.h"
#include "stages/eval/statistics.h"

namespace espalier {

struct EvalOptions {
  Numerics numerics = Numerics::kKvq;
  Products products = Products::kExact;  // with which the models were loaded; recorded only
  int64_t chunk = 256;  // positions per forward call; does not change the result in full and kvq
};

struct DomainScore {
  std::string name;
  int64_t rows = 0;  // rows with at least one scored position
  ScoreSums sums;
};

struct EvalResult {
  bool has_candidate = false;  // false: perplexity of one model, only nll_reference counts
  ScoreSums total;
  std::vector<DomainScore> domains;  // order of first appearance in the panel
  double kl_domain_mean = 0;         // mean of the domains' means
  int64_t rows = 0;                  // rows with scored positions
  int64_t unscored_rows = 0;         // rows without any
  Sidecar sidecar;                   // arrays and domain names; the caller adds provenance to the metadata
};

// The models must share a vocabulary. Errors: failed_precondition for different vocabularies; data_loss when the panel
// does not fit the models or scores nothing, or when logits are not finite (naming row and position); cancelled.
Result<EvalResult> evaluate_kl(const LoadedModel& reference, const LoadedModel& candidate, const Dataset& panel,
                               const EvalOptions& options, Progress& progress, ThreadPool& pool);
// Perplexity of one model: total.nll_reference and the sidecar's nll_reference are its values.
Result<EvalResult> evaluate_ppl(const LoadedModel& model, const Dataset& panel, const EvalOptions& options,
                                Progress& progress, ThreadPool& pool);

// What the numbers belong to, for the result record.
struct EvalProvenance {
  std::string tool;          // "espalier 0.1.0"
  std::string reference_id;  // model_identity
  std::string candidate_id;  // empty: none
  std::string panel_sha256;  // of the file
  std::string panel_content_sha256;
  int64_t panel_rows = 0;  // rows of the file; fewer may have been run
  EvalOptions options;
  double seconds = 0;
};

// The result record (one JSON document, no newline): contract keys kl_mean, kl_domain_mean, top1, ppl, positions,
// domains, and percentiles, confidence buckets, both perplexities, provenance.
std::string eval_record(const EvalResult& result, const EvalProvenance& provenance, int indent = -1);
// The same for people: one line per domain and one for all.
std::string eval_report(const EvalResult& result, const EvalProvenance& provenance);
// Adds the provenance to the sidecar's metadata.
void describe_sidecar(const EvalProvenance& provenance, Sidecar* sidecar);

}  // namespace espalier
