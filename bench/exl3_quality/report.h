// Numbers and tables of the comparison. Formats: text for people, one JSON document for programs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/exl3_quality/golden.h"
#include "bench/exl3_quality/panel.h"

namespace espalier::quality {

// One arm at one width.
struct ArmResult {
  std::string arm;
  int k2 = 0;
  std::vector<double> true_errors;  // per matrix
  PanelScores panel;                // empty rows: not run
  double encode_seconds = 0;
  std::string digest;
};

struct Report {
  std::vector<GoldenResult> golden;
  int golden_seeds = 0;
  std::vector<std::string> matrices;  // names, in the order of ArmResult::true_errors
  std::vector<ArmResult> arms;        // peer first within a width
  std::string machine, identity, panel;
  int64_t calibration_rows = 0, calibration_tokens = 0, panel_rows = 0;
  int n_layers = 0, n_threads = 0;
  bool is_complete = false;  // all rows, layers and widths of the primary comparison: only then may the claim be judged
  double seconds = 0;
};

std::string report_text(const Report& report);
std::string report_json(const Report& report);  // one document, no newline

}  // namespace espalier::quality
