// Encodes chosen matrices of a finished pack again, from the native weights and the calibration rows, to see whether the same
// bytes come out.
//
// The rows stream through the pack's own layers, as they did when the pack was made, so that the inputs of a chosen matrix are
// those it was encoded for; only layers up to the last chosen one are run. w1 and w3 of an expert are encoded with its w2, whose
// inputs depend on them. Source: quality.md 7, item 4.
#pragma once

#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/dataset.h"
#include "model/weights.h"
#include "stages/quantize/quantize.h"

namespace espalier {

struct Reencoded {
  std::string stem;
  std::string difference;  // empty: trellis, suh and svh are byte-equal
};

// native: the checkpoint; pack: made from it, with the same config. rows: those of the run. options: of the run; widths are
// taken from the pack. stems: EXL3 matrices of the pack. One result per stem, in the order of the network. Errors: those of
// quantize; cancelled.
Result<std::vector<Reencoded>> reencode(const WeightLoader& native, const WeightLoader& pack,
                                        const std::vector<DatasetRow>& rows, const QuantizeOptions& options,
                                        const std::vector<std::string>& stems, Progress& progress, ThreadPool& pool);

}  // namespace espalier
