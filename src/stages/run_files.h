// The records that a run leaves in its pack: run.json, matrices.jsonl and reproduce.md. Functions of inputs, options and
// results; no time, thread count, path or host is in them. Source: quality.md 7; docs/formats/pack.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/dataset.h"
#include "stages/make_pack.h"
#include "stages/pack/describe.h"
#include "stages/pack/pack.h"

namespace espalier {

// What identifies a calibration set, after the rows of the run were chosen.
struct CalibrationFacts {
  std::string sha256;
  std::string content_sha256;
};
CalibrationFacts calibration_facts(const Dataset& data);

std::vector<PackText> run_records(const MakePackOptions& options, const CalibrationFacts& data,
                                  const QuantizeReport& report, const PackSummary& summary);

}  // namespace espalier
