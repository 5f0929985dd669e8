#include "stages/eval/eval.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

namespace espalier {
namespace {

// Runs one sequence through a model in chunks; the logits of the newest chunk are in `logits`.
class SequenceRun {
 public:
  static Result<SequenceRun> open(const LoadedModel& model, const EvalOptions& options, ThreadPool& pool) {
    SequenceRun run;
    ASSIGN_OR_RETURN(run.feed_, model.open(options.numerics, pool));
    return run;
  }

  Status step(std::span<const int32_t> ids) {
    ASSIGN_OR_RETURN(logits, feed_(ids));
    return ok_status();
  }

  std::span<const float> row(int64_t t) const {
    const int64_t vocab = logits.dim(1);
    return logits.as<float>().subspan(static_cast<size_t>(t * vocab), static_cast<size_t>(vocab));
  }

  Tensor logits;  // [chunk, vocab]

 private:
  SequenceRun() = default;
  LoadedModel::Feed feed_;
};

bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

Status check_panel(const LoadedModel& model, const Dataset& panel) {
  return check_dataset_fits(panel, model.config().vocab, model.config().max_positions, "panel");
}

Result<EvalResult> evaluate(const LoadedModel& reference, const LoadedModel* candidate, const Dataset& panel,
                            const EvalOptions& options, Progress& progress, ThreadPool& pool) {
  RETURN_IF_ERROR(check_panel(reference, panel));
  EvalResult out;
  out.has_candidate = candidate != nullptr;
  std::map<std::string, size_t> domain_index;
  for (const std::string& name : panel.domains()) {
    domain_index.emplace(name, out.domains.size());
    out.domains.push_back({name, 0, {}});
    out.sidecar.domains.push_back(name);
  }
  progress.begin(out.has_candidate ? "kl" : "ppl", panel.n_tokens());
  std::vector<PositionScore> scores;
  for (size_t r = 0; r < panel.rows.size(); ++r) {
    const DatasetRow& row = panel.rows[r];
    const std::vector<int32_t> scored = scored_positions(row);
    if (scored.empty()) {
      ++out.unscored_rows;
      progress.advance(static_cast<int64_t>(row.ids.size()));
      continue;
    }
    const size_t domain = domain_index.at(row.domain);
    DomainScore& domain_score = out.domains[domain];
    ASSIGN_OR_RETURN(SequenceRun reference_run, SequenceRun::open(reference, options, pool));
    std::optional<SequenceRun> candidate_run;
    if (candidate != nullptr) {
      ASSIGN_OR_RETURN(candidate_run, SequenceRun::open(*candidate, options, pool));
    }
    size_t next = 0;  // first scored position not yet handled
    const auto n_ids = static_cast<int64_t>(row.ids.size());
    for (int64_t begin = 0; begin < n_ids && next < scored.size(); begin += options.chunk) {
      if (progress.is_cancelled()) return cancelled("stopped at panel row '" + row.id + "'");
      const int64_t n = std::min(options.chunk, n_ids - begin);
      const std::span<const int32_t> ids(row.ids.data() + begin, static_cast<size_t>(n));
      RETURN_IF_ERROR(reference_run.step(ids));
      if (candidate_run) RETURN_IF_ERROR(candidate_run->step(ids));
      size_t last = next;
      while (last < scored.size() && scored[last] < begin + n) ++last;
      scores.assign(last - next, {});
      int64_t bad = -1;
      pool.parallel_for(static_cast<int64_t>(last - next), 4, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i) {
          const int32_t t = scored[next + static_cast<size_t>(i)];
          const int32_t label = row.ids[static_cast<size_t>(t) + 1];
          const std::span<const float> p = reference_run.row(t - begin);
          const std::span<const float> q = candidate_run ? candidate_run->row(t - begin) : p;
          PositionScore& score = scores[static_cast<size_t>(i)];
          if (!all_finite(p) || !all_finite(q)) {
            score.kl = std::nan("");
          } else if (candidate_run) {
            score = score_position(p, q, label);
          } else {
            score.nll_reference = negative_log_likelihood(p, label);
          }
        }
      });
      for (size_t i = 0; i < scores.size() && bad < 0; ++i) {
        if (std::isnan(scores[i].kl)) bad = scored[next + i];
      }
      if (bad >= 0) {
        return data_loss("panel row '" + row.id + "' position " + std::to_string(bad) +
                         ": the model's logits are not finite; run 'espalier verify' on it");
      }
      for (size_t i = 0; i < scores.size(); ++i) {  // row order: sums do not depend on the threads
        domain_score.sums.add(scores[i]);
        Sidecar& s = out.sidecar;
        s.row.push_back(static_cast<int32_t>(r));
        s.position.push_back(scored[next + i]);
        s.domain.push_back(static_cast<int32_t>(domain));
        s.nll_reference.push_back(static_cast<float>(scores[i].nll_reference));
        if (!out.has_candidate) continue;
        s.kl.push_back(static_cast<float>(scores[i].kl));
        s.nll_candidate.push_back(static_cast<float>(scores[i].nll_candidate));
        s.confidence.push_back(static_cast<float>(scores[i].confidence));
        s.same_top1.push_back(scores[i].same_top1 ? 1 : 0);
      }
      next = last;
      progress.advance(n, row.domain);
    }
    ++domain_score.rows;
    ++out.rows;
  }
  std::erase_if(out.domains, [](const DomainScore& d) { return d.sums.positions == 0; });
  if (out.domains.empty()) {
    return data_loss("the panel has no scored positions: no row has an assistant or raw token after its first one");
  }
  for (const DomainScore& d : out.domains) {
    out.total.add(d.sums);
    out.kl_domain_mean += d.sums.kl_mean() / static_cast<double>(out.domains.size());
  }
  return out;
}

}  // namespace

Result<EvalResult> evaluate_kl(const LoadedModel& reference, const LoadedModel& candidate, const Dataset& panel,
                               const EvalOptions& options, Progress& progress, ThreadPool& pool) {
  if (reference.config().vocab != candidate.config().vocab) {
    return failed_precondition(
        "reference and candidate have different vocabularies: " + std::to_string(reference.config().vocab) + " and " +
        std::to_string(candidate.config().vocab));
  }
  RETURN_IF_ERROR(check_panel(candidate, panel));
  return evaluate(reference, &candidate, panel, options, progress, pool);
}

Result<EvalResult> evaluate_ppl(const LoadedModel& model, const Dataset& panel, const EvalOptions& options,
                                Progress& progress, ThreadPool& pool) {
  return evaluate(model, nullptr, panel, options, progress, pool);
}

}  // namespace espalier
