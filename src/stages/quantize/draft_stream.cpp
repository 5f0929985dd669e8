#include "stages/quantize/draft_stream.h"

namespace espalier {

std::vector<int64_t> DraftCalibration::draft_positions(int64_t n, int64_t stride) {
  std::vector<int64_t> out;
  for (int64_t p = stride - 1; p <= n - 2; p += stride) out.push_back(p);
  if (out.empty() && n >= 3) out.push_back(n - 2);
  return out;
}

Result<DraftCalibration> DraftCalibration::begin(const CallContext& context, const GlobalWeights& globals,
                                                 const DrafterGlobals& drafter, const CalibrationStream& backbone,
                                                 int64_t stride) {
  DraftCalibration out;
  const int64_t d = context.config.d_model;
  for (size_t i = 0; i < backbone.size(); ++i) {
    RETURN_IF_ERROR(backbone.visit(i, [&](const CalibrationRow& source) {
      Row row;
      row.n_tokens = source.stream.n_rows();
      row.main_x.resize(static_cast<size_t>(row.n_tokens * d));
      draft_main_x(context, drafter, source.stream.taps.f32(), row.n_tokens, row.main_x.data());
      row.positions = draft_positions(row.n_tokens, stride);
      for (int64_t p : row.positions) {
        DraftStream draft;
        begin_draft(context, globals, source.stream.ids[static_cast<size_t>(p + 1)], p + 1, &draft);
        row.drafts.push_back(std::move(draft));
      }
      out.rows_.push_back(std::move(row));
      return ok_status();
    }));
  }
  return out;
}

Status DraftCalibration::observe_taps(const CallContext& context, const DrafterGlobals& drafter,
                                      const CalibrationStream& backbone, LayerObserver* observer, Progress& progress,
                                      double units) {
  CallContext observed = context;
  observed.observer = observer;
  std::vector<float> main_x;
  for (size_t i = 0; i < backbone.size(); ++i) {
    if (progress.is_cancelled()) return cancelled("stopped before the drafter");
    RETURN_IF_ERROR(backbone.visit(i, [&](const CalibrationRow& row) {
      main_x.resize(static_cast<size_t>(row.stream.n_rows() * context.config.d_model));
      draft_main_x(observed, drafter, row.stream.taps.f32(), row.stream.n_rows(), main_x.data());
      progress.advance(pass_units(row.stream.n_rows(), units));
      return ok_status();
    }));
  }
  return ok_status();
}

Status DraftCalibration::run_stage(const CallContext& context, const BlockWeights& weights, int stage, bool keep,
                                   Progress& progress, double units) {
  const int64_t d = context.config.d_model;
  for (Row& row : rows_) {
    if (progress.is_cancelled()) return cancelled("stopped in drafter stage " + std::to_string(stage));
    DrafterState state(context.config);
    WindowRing& ring = state.rings.at(static_cast<size_t>(stage));
    int64_t seeded = 0;
    for (size_t i = 0; i < row.drafts.size(); ++i) {
      // The context up to and including position p, then the draft after it. A ring keeps a window: a stretch is never
      // longer.
      const int64_t end = row.positions[i] + 1;
      while (seeded < end) {
        const int64_t n = std::min<int64_t>(end - seeded, ring.n_slots);
        seed_stage(context, weights, stage, row.main_x.data() + seeded * d, n, seeded, ring);
        seeded += n;
      }
      if (keep) {
        run_draft_stage(context, weights, stage, ring, 0, row.drafts[i]);
      } else {
        DraftStream scratch = row.drafts[i];
        run_draft_stage(context, weights, stage, ring, 0, scratch);
      }
    }
    progress.advance(pass_units(static_cast<int64_t>(row.drafts.size()) * context.config.drafter.block_size, units));
  }
  return ok_status();
}

Status DraftCalibration::observe_stage(const CallContext& context, const BlockWeights& weights, int stage,
                                       LayerObserver* observer, Progress& progress, double units) {
  CallContext observed = context;
  observed.observer = observer;
  return run_stage(observed, weights, stage, false, progress, units);
}

Status DraftCalibration::advance_stage(const CallContext& context, const BlockWeights& weights, int stage,
                                       Progress& progress, double units, LayerObserver* observer) {
  CallContext observed = context;
  observed.observer = observer;
  return run_stage(observed, weights, stage, true, progress, units);
}

int64_t DraftCalibration::n_calls() const {
  int64_t n = 0;
  for (const Row& row : rows_) n += static_cast<int64_t>(row.drafts.size());
  return n;
}

}  // namespace espalier
