// KL of the native network to the same network with its routed experts replaced, row by row of a panel.
//
// One network is in memory; for each row the native experts run first, then every candidate's are swapped in.
// Everything else stays native. Scores are those of `espalier eval kl` (stages/eval/statistics.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "bench/exl3_quality/encode.h"
#include "model/dataset.h"
#include "model/weights.h"
#include "stages/eval/statistics.h"

namespace espalier::quality {

struct PanelCandidate {
  std::string name;  // for progress
  const EncodedSet* experts = nullptr;
};

// Sums per scored row of the panel, in panel order; rows without scored positions are left out.
struct PanelScores {
  std::vector<ScoreSums> rows;
  ScoreSums total() const;
};

// Results of earlier runs of the same program are taken from `work`. numerics kvq. Errors: data_loss for logits that
// are not finite, those of loading and running.
Result<std::vector<PanelScores>> score_panel(const WeightLoader& loader, const ExpertSet& experts,
                                             const std::vector<PanelCandidate>& candidates,
                                             const std::vector<DatasetRow>& panel, const std::filesystem::path& work,
                                             Progress& progress, ThreadPool& pool);

}  // namespace espalier::quality
