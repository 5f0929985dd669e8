#include "bench/exl3_ablation/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace espalier::ablation {
namespace {

struct Mean {
  double sum = 0;
  int count = 0;

  void add(double ratio) {
    sum += std::log(ratio);
    ++count;
  }
  std::string text() const {
    if (count == 0) return "-";
    char s[32];
    std::snprintf(s, sizeof s, "%.4f", std::exp(sum / count));
    return s;
  }
};

std::string padded(const std::string& text, size_t width) {
  return text.size() < width ? text + std::string(width - text.size(), ' ') : text;
}

}  // namespace

std::string table_text(const std::vector<Sample>& samples, const std::vector<VariantResult>& results, int k2) {
  constexpr size_t kName = 30;
  constexpr size_t kCell = 20;
  std::vector<std::string> groups;
  for (const Sample& s : samples) {
    if (k2 != 0 && s.k2 != k2) continue;
    if (std::find(groups.begin(), groups.end(), s.group) == groups.end()) groups.push_back(s.group);
  }
  std::string text = padded("", kName);
  for (const std::string& group : groups) text += "  " + padded(group, kCell);
  text += "\n" + padded("", kName);
  for (const std::string& group : groups) {
    text += "  " + padded(group == "golden" ? "ratio   of recorded" : "fitted  held out", kCell);
  }
  text += "  seconds\n";
  for (const VariantResult& result : results) {
    text += padded(result.name, kName);
    for (const std::string& group : groups) {
      Mean fit, other;
      for (size_t i = 0; i < samples.size(); ++i) {
        const Outcome& own = result.outcomes[i];
        const Outcome& base = results.front().outcomes[i];
        if (samples[i].group != group || (k2 != 0 && samples[i].k2 != k2) || !own.is_valid) continue;
        fit.add(own.fit / base.fit);
        if (samples[i].recorded > 0) other.add(own.fit / samples[i].recorded);
        if (!samples[i].held_out.empty()) other.add(own.held_out / base.held_out);
      }
      text += "  " + padded(padded(fit.text(), 8) + other.text(), kCell);
    }
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "  %7.1f\n", result.seconds);
    text += seconds;
  }
  return text;
}

}  // namespace espalier::ablation
