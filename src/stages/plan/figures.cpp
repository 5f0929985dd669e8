// The figures of a plan's report, as SVG. Colours follow the reader's light or dark setting; every mark has a title to
// hover over.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <map>

#include "stages/plan/report.h"

namespace espalier {
namespace {

constexpr double kWidth = 860, kLeft = 64, kRight = 24, kTop = 64, kBottom = 48;

class Svg {
 public:
  Svg(double height, const std::string& title) {
    add("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"%s\" "
        "font-family=\"system-ui, sans-serif\" "
        "font-size=\"12\">\n",
        kWidth, height, title.c_str());
    out_ +=
        "<style>\n.page{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.grid{stroke:#d1d9e0}.main{stroke:#0969da}."
        "other{stroke:#9a6700}"
        ".dot{fill:#0969da}.edge{stroke:#ffffff}\n@media (prefers-color-scheme: "
        "dark){.page{fill:#0d1117}.ink{fill:#f0f6fc}.soft{fill:#9198a1}"
        ".grid{stroke:#3d444d}.main{stroke:#4493f8}.other{stroke:#d29922}.dot{fill:#4493f8}.edge{stroke:#0d1117}}\n</"
        "style>\n";
    add("<rect class=\"page\" width=\"%g\" height=\"%g\"/>\n", kWidth, height);
    text(kLeft, 24, "ink", "start", title, 15);
  }

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    std::array<char, 1024> buffer;
    va_list arguments;
    va_start(arguments, format);
    const int n = std::vsnprintf(buffer.data(), buffer.size(), format, arguments);
    va_end(arguments);
    out_.append(buffer.data(), std::min(static_cast<size_t>(std::max(n, 0)), buffer.size() - 1));
  }

  // `what` is ours and has no markup.
  void text(double x, double y, const char* ink, const char* anchor, const std::string& what, int size = 12) {
    add("<text class=\"%s\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%d\">%s</text>\n", ink, x, y, anchor,
        size, what.c_str());
  }
  void line(const char* ink, double x1, double y1, double x2, double y2) {
    add("<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", ink, x1, y1, x2, y2);
  }
  std::string finish() { return out_ + "</svg>\n"; }

 private:
  std::string out_;
};

// From light to strong over the widths that occur, the narrowest first; native stands apart.
std::map<int, std::string> colours_of(const std::vector<int>& widths) {
  std::map<int, std::string> out;
  const auto last = static_cast<double>(std::max<size_t>(widths.size(), 2) - 1);
  for (size_t k = 0; k < widths.size(); ++k) {
    const double t = static_cast<double>(k) / last;
    char text[16];
    std::snprintf(text, sizeof text, "#%02x%02x%02x", static_cast<unsigned>(std::lround(186 - 168 * t)),
                  static_cast<unsigned>(std::lround(218 - 140 * t)), static_cast<unsigned>(std::lround(246 - 76 * t)));
    out[widths[k]] = widths[k] == kNativeWidth ? "#bc4c00" : text;
  }
  return out;
}

double bits_of(int k2) {
  return k2 == kNativeWidth ? 4.25 : k2 / 2.0;
}

std::map<int, int64_t> counts_of(const std::vector<ExpertWidths>& experts) {
  std::map<int, int64_t> out;
  for (const ExpertWidths& w : experts) {
    for (const int k2 : {w.w1, w.w3, w.w2}) ++out[k2];
  }
  return out;
}

// Widths that occur, the narrowest first, native last.
std::vector<int> widths_in(const PackPlan& plan, int n_layers) {
  std::map<double, int> seen;
  for (int layer = 0; layer < n_layers; ++layer) {
    for (const auto& [k2, n] : counts_of(plan.experts.at(layer))) seen[k2 == kNativeWidth ? 1e9 : bits_of(k2)] = k2;
  }
  std::vector<int> out;
  for (const auto& [order, k2] : seen) out.push_back(k2);
  return out;
}

std::string short_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

}  // namespace

std::string widths_by_layer_svg(const PackPlan& plan, int n_layers) {
  const std::vector<int> widths = widths_in(plan, n_layers);
  auto colours = colours_of(widths);
  const double height = 360, plot = height - kTop - kBottom;
  Svg svg(height, "Widths by layer");
  double x = kLeft;
  for (const int k2 : widths) {
    svg.add("<rect x=\"%.1f\" y=\"36\" width=\"12\" height=\"12\" fill=\"%s\"/>\n", x, colours[k2].c_str());
    svg.text(x + 17, 46, "soft", "start", k2 == kNativeWidth ? "native" : width_text_of(k2) + " bits");
    x += 76;
  }
  for (int tick = 0; tick <= 4; ++tick) {
    const double y = kTop + plot * (1 - tick / 4.0);
    svg.line("grid", kLeft, y, kWidth - kRight, y);
    svg.text(kLeft - 8, y + 4, "soft", "end", std::to_string(25 * tick) + " %");
  }
  const double step = (kWidth - kLeft - kRight) / n_layers;
  const int every = n_layers > 20 ? 5 : 1;
  for (int layer = 0; layer < n_layers; ++layer) {
    const std::vector<ExpertWidths>& experts = plan.experts.at(layer);
    const auto counts = counts_of(experts);
    const auto total = static_cast<double>(3 * experts.size());
    double y = kTop + plot, mean = 0;
    for (const auto& [k2, n] : counts) mean += bits_of(k2) * static_cast<double>(n) / total;
    for (const int k2 : widths) {
      const auto it = counts.find(k2);
      if (it == counts.end()) continue;
      const double h = plot * static_cast<double>(it->second) / total;
      y -= h;
      svg.add(
          "<rect class=\"edge\" stroke-width=\"0.5\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" "
          "fill=\"%s\"><title>layer %d: %lld of "
          "%.0f matrices at %s, mean %.3f bits</title></rect>\n",
          kLeft + step * layer + 0.08 * step, y, 0.84 * step, h, colours[k2].c_str(), layer,
          static_cast<long long>(it->second), total, width_text_of(k2).c_str(), mean);
    }
    if (layer % every == 0)
      svg.text(kLeft + step * (layer + 0.5), kTop + plot + 16, "soft", "middle", std::to_string(layer));
  }
  svg.text((kLeft + kWidth - kRight) / 2, height - 10, "soft", "middle", "layer");
  return svg.finish();
}

std::string widths_svg(const PackPlan& plan, int n_layers) {
  std::map<int, int64_t> counts;
  for (int layer = 0; layer < n_layers; ++layer) {
    for (const auto& [k2, n] : counts_of(plan.experts.at(layer))) counts[k2] += n;
  }
  const std::vector<int> widths = widths_in(plan, n_layers);
  auto colours = colours_of(widths);
  int64_t most = 1;
  for (const auto& [k2, n] : counts) most = std::max(most, n);
  const double height = 300, plot = height - kTop - kBottom;
  Svg svg(height, "Routed matrices of each width");
  svg.line("grid", kLeft, kTop + plot, kWidth - kRight, kTop + plot);
  const double step = (kWidth - kLeft - kRight) / static_cast<double>(widths.size());
  for (size_t k = 0; k < widths.size(); ++k) {
    const int64_t n = counts[widths[k]];
    const double h = plot * static_cast<double>(n) / static_cast<double>(most),
                 x = kLeft + step * static_cast<double>(k);
    const double bar = std::min(0.7 * step, 90.0);
    svg.add(
        "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"><title>%s: %lld "
        "matrices</title></rect>\n",
        x + (step - bar) / 2, kTop + plot - h, bar, h, colours[widths[k]].c_str(), width_text_of(widths[k]).c_str(),
        static_cast<long long>(n));
    svg.text(x + step / 2, kTop + plot - h - 6, "ink", "middle", std::to_string(n));
    svg.text(x + step / 2, kTop + plot + 18, "soft", "middle", width_text_of(widths[k]));
  }
  svg.text((kLeft + kWidth - kRight) / 2, height - 8, "soft", "middle", "bits per weight");
  return svg.finish();
}

std::string budget_curve_svg(const std::vector<BudgetPoint>& curve, const BudgetPoint& chosen) {
  const double height = 380, plot = height - kTop - kBottom;
  Svg svg(height, "Predicted KL against the budget");
  double low = chosen.kl, high = std::max(chosen.kl, chosen.uniform_kl), left = chosen.bpw, right = chosen.bpw;
  for (const BudgetPoint& p : curve) {
    low = std::min({low, p.kl, p.uniform_kl});
    high = std::max({high, p.kl, p.uniform_kl});
    left = std::min(left, p.bpw);
    right = std::max(right, p.bpw);
  }
  low = std::max(low, 1e-12);
  high = std::max(high, low * 1.01);
  right = std::max(right, left + 1e-3);
  const auto x_of = [&](double bpw) { return kLeft + (kWidth - kLeft - kRight) * (bpw - left) / (right - left); };
  const auto y_of = [&](double kl) {
    return kTop + plot * (1 - (std::log(std::max(kl, low)) - std::log(low)) / (std::log(high) - std::log(low)));
  };
  for (int tick = 0; tick <= 4; ++tick) {
    const double kl = low * std::pow(high / low, tick / 4.0), bpw = left + (right - left) * tick / 4.0;
    svg.line("grid", kLeft, y_of(kl), kWidth - kRight, y_of(kl));
    svg.text(kLeft - 8, y_of(kl) + 4, "soft", "end", short_number(kl));
    svg.text(x_of(bpw), kTop + plot + 18, "soft", "middle", short_number(bpw));
  }
  for (const bool is_uniform : {true, false}) {
    std::string points;
    for (const BudgetPoint& p : curve) {
      char pair[48];
      std::snprintf(pair, sizeof pair, "%.1f,%.1f ", x_of(p.bpw), y_of(is_uniform ? p.uniform_kl : p.kl));
      points += pair;
    }
    const char* ink = is_uniform ? "other" : "main";
    svg.add("<polyline class=\"%s\" fill=\"none\" stroke-width=\"2\"%s points=\"", ink,
            is_uniform ? " stroke-dasharray=\"6 4\"" : "");
    for (size_t at = 0; at < points.size(); at += 512) svg.add("%s", points.substr(at, 512).c_str());
    svg.add("\"/>\n");
    const double at = is_uniform ? kLeft + 110 : kLeft;
    svg.add("<line class=\"%s\" stroke-width=\"2\"%s x1=\"%.1f\" y1=\"42\" x2=\"%.1f\" y2=\"42\"/>\n", ink,
            is_uniform ? " stroke-dasharray=\"6 4\"" : "", at, at + 24);
    svg.text(at + 30, 46, "soft", "start", is_uniform ? "uniform mix, storage only" : "best plan");
  }
  svg.add(
      "<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"><title>%.4f bits per weight: %.6g nats</title></circle>\n",
      x_of(chosen.bpw), y_of(chosen.kl), chosen.bpw, chosen.kl);
  svg.text((kLeft + kWidth - kRight) / 2, height - 8, "soft", "middle",
           "bits per weight (nats on the left, logarithmic)");
  return svg.finish();
}

}  // namespace espalier
