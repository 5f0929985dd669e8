// The files around `espalier plan`: the tables that a plan is made from, checked to belong together, and the report's
// folder.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "base/status.h"
#include "model/block_slopes.h"
#include "stages/plan/plan.h"

namespace espalier {

struct PlanPaths {
  std::filesystem::path checkpoint;  // folder
  std::filesystem::path
      stats;  // folder: routing.safetensors and, when a width library was measured, errors.safetensors
  std::filesystem::path sensitivity;      // S.json; per-block slopes lie in S.blocks.safetensors beside it
  std::filesystem::path around, present;  // both or none: a table measured around a plan, and that plan
  bool law_only = false;                  // leave measured errors aside
};

struct LoadedTables {
  PlanInputs tables;  // re-linearised when paths.around is set
  std::optional<BlockSlopes> blocks;
  std::map<std::string, std::string> hashes;  // for the plan's `inputs`
};

// Errors: those of the readers; failed_precondition naming the file, expected and found, when the checkpoint or a file
// is not the one that the sensitivity table was measured with; invalid_argument when only one of around and present is
// given.
Result<LoadedTables> load_plan_tables(const PlanPaths& paths);

// report.html, report.txt, experts.csv, widths_by_layer.svg, widths.svg, budget.svg; the folder appears whole or not at all.
// A path that ends in .html: the page alone. Errors: those of AtomicDirectory and write_text_file.
Status write_plan_report(const std::filesystem::path& dir, const PlanInputs& tables, const PlanRequest& request,
                         const PlanOutcome& outcome);

}  // namespace espalier
