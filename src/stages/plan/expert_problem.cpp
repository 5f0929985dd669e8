#include "stages/plan/expert_problem.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <utility>

#include "model/names.h"
#include "stages/plan/hulls.h"

namespace espalier {
namespace {

constexpr size_t kShownPins = 6;

// Bounds of one expert's matrices, and the pin that set each lower one (-1: none).
struct Bounds {
  std::array<int, kExpertMatrices> low{}, high{};
  std::array<int, kExpertMatrices> low_pin{}, high_pin{};
};

class Builder {
 public:
  Builder(const PlanInputs& inputs, const PlanRequest& request, const ExpertErrors& errors)
      : inputs_(inputs), request_(request), errors_(errors) {
    for (const int k2 : request.widths) {
      if (k2 == kNativeWidth) {
        has_native_ = true;
      } else {
        widths_.push_back(k2);
      }
    }
    std::sort(widths_.begin(), widths_.end());
  }

  Result<ExpertProblem> build() {
    if (widths_.empty()) return invalid_argument("plan: expected at least one trellis width, found none");
    out_.pins = request_.pins;
    pin_super_experts();
    out_.allocation.domains = errors_.domains();
    out_.allocation.slopes = errors_.slopes();
    pin_bits_.assign(out_.pins.size(), 0);
    pin_reads_.assign(out_.pins.size(), 0);
    for (int layer = 0; layer < inputs_.config.n_layers; ++layer) {
      for (int expert = 0; expert < static_cast<int>(inputs_.config.n_experts); ++expert) {
        ASSIGN_OR_RETURN(const Bounds bounds, bounds_of(layer, expert));
        RETURN_IF_ERROR(add_item(layer, expert, bounds));
      }
    }
    RETURN_IF_ERROR(set_limits());
    RETURN_IF_ERROR(check_pins());
    return std::move(out_);
  }

 private:
  size_t item_of(int layer, int expert) const {
    return static_cast<size_t>(layer) * static_cast<size_t>(inputs_.config.n_experts) + static_cast<size_t>(expert);
  }

  bool is_within(const WidthPin& pin, int layer, int expert) const {
    return (pin.first_layer < 0 || (layer >= pin.first_layer && layer <= pin.last_layer)) &&
           (pin.first_expert < 0 || (expert >= pin.first_expert && expert <= pin.last_expert));
  }

  void pin_super_experts() {
    if (!(request_.super_share > 0)) return;
    const int k2 = std::min(request_.super_k2, widths_.back());
    for (int layer = 0; layer < inputs_.config.n_layers; ++layer) {
      for (int expert = 0; expert < static_cast<int>(inputs_.config.n_experts); ++expert) {
        const double share = errors_.largest_share(static_cast<size_t>(layer), static_cast<size_t>(expert));
        if (share < request_.super_share) continue;
        char reason[48];
        std::snprintf(reason, sizeof reason, "super expert %.2f", share);
        super_pins_[item_of(layer, expert)] = out_.pins.size();
        out_.pins.push_back({layer, layer, expert, expert, -1, k2, 0, reason});
      }
    }
  }

  Result<Bounds> bounds_of(int layer, int expert) {
    Bounds b;
    b.low.fill(0);
    b.high.fill(1 << 20);
    b.low_pin.fill(-1);
    b.high_pin.fill(-1);
    const size_t item = item_of(layer, expert);
    std::vector<size_t> felt;
    for (size_t p = 0; p < request_.pins.size(); ++p) {
      if (is_within(request_.pins[p], layer, expert)) felt.push_back(p);
    }
    if (const auto it = super_pins_.find(item); it != super_pins_.end()) felt.push_back(it->second);
    for (const size_t p : felt) {
      const WidthPin& pin = out_.pins[p];
      for (int m = 0; m < kExpertMatrices; ++m) {
        if (pin.matrix >= 0 && pin.matrix != m) continue;
        const auto i = static_cast<size_t>(m);
        if (pin.min_k2 > b.low[i]) {
          b.low[i] = pin.min_k2;
          b.low_pin[i] = static_cast<int>(p);
        }
        if (pin.max_k2 != 0 && pin.max_k2 < b.high[i]) {
          b.high[i] = pin.max_k2;
          b.high_pin[i] = static_cast<int>(p);
        }
      }
    }
    // Matrices that share a width share their bounds.
    const auto tie = [&](size_t a, size_t c) {
      for (const auto& [x, y] : {std::pair{a, c}, std::pair{c, a}}) {
        if (b.low[x] > b.low[y]) b.low[y] = b.low[x], b.low_pin[y] = b.low_pin[x];
        if (b.high[x] < b.high[y]) b.high[y] = b.high[x], b.high_pin[y] = b.high_pin[x];
      }
    };
    if (!request_.per_matrix || request_.ties_gate_up) tie(0, 1);
    if (!request_.per_matrix) tie(0, 2), tie(0, 1);
    for (size_t m = 0; m < kExpertMatrices; ++m) {
      const bool has_width =
          std::any_of(widths_.begin(), widths_.end(), [&](int k2) { return k2 >= b.low[m] && k2 <= b.high[m]; });
      if (has_width || (has_native_ && allows_native(b))) continue;
      std::string pins;
      for (const int p : {b.low_pin[m], b.high_pin[m]}) {
        if (p >= 0) pins += (pins.empty() ? "'" : " and '") + out_.pins[static_cast<size_t>(p)].text() + "'";
      }
      return failed_precondition("plan: pins " + pins + " leave no width of the set " + widths_text() + " for expert " +
                                 std::to_string(expert) + " of layer " + std::to_string(layer) +
                                 "; change them or --widths");
    }
    return b;
  }

  // Native matrices have no error and 4.25 bits: every lower bound is met, upper ones count the bits.
  bool allows_native(const Bounds& b) const {
    return std::all_of(b.high.begin(), b.high.end(), [](int high) { return high * 2 >= 17; });
  }

  std::string widths_text() const {
    std::string out;
    for (const int k2 : widths_) out += (out.empty() ? "" : ",") + width_text_of(k2);
    return has_native_ ? out + ",native" : out;
  }

  Status add_item(int layer, int expert, const Bounds& bounds) {
    const auto l = static_cast<size_t>(layer), e = static_cast<size_t>(expert);
    AllocationItem item;
    std::vector<ExpertWidths> choices;
    // Groups of matrices that share a width.
    std::vector<std::vector<int>> groups;
    if (!request_.per_matrix) {
      groups = {{0, 1, 2}};
    } else if (request_.ties_gate_up) {
      groups = {{0, 1}, {2}};
    } else {
      groups = {{0}, {1}, {2}};
    }
    struct Group {
      std::vector<int> matrices;
      std::vector<HullPoint> hull;
      std::vector<int> k2;  // by option
      size_t at = 0;
    };
    std::vector<Group> parts;
    bool has_trellis = true;
    for (const std::vector<int>& matrices : groups) {
      Group g;
      g.matrices = matrices;
      std::vector<AllocationOption> options;
      const auto first = static_cast<size_t>(matrices[0]);
      for (const int k2 : widths_) {
        if (k2 < bounds.low[first] || k2 > bounds.high[first]) continue;
        double error = 0;
        for (const int m : matrices) error += errors_.matrix_error(l, e, static_cast<ExpertMatrix>(m), k2);
        options.push_back({k2, static_cast<int64_t>(matrices.size()) * errors_.matrix_half_bits(k2), error});
        g.k2.push_back(k2);
      }
      if (options.empty()) has_trellis = false;
      // One group: the solver makes the hull itself and may use the rest when few items are open.
      if (!request_.per_matrix) {
        for (const AllocationOption& o : options) {
          choices.push_back({o.label, o.label, o.label});
          item.options.push_back({static_cast<int>(choices.size()) - 1, o.half_bits, o.error});
        }
      }
      append_lower_hull(options, g.hull);
      parts.push_back(std::move(g));
    }
    if (request_.per_matrix && has_trellis) {
      while (true) {
        std::array<int, kExpertMatrices> k2{};
        AllocationOption o;
        for (const Group& g : parts) {
          const HullPoint& p = g.hull[g.at];
          for (const int m : g.matrices) k2[static_cast<size_t>(m)] = g.k2[static_cast<size_t>(p.option)];
          o.half_bits += p.half_bits;
          o.error += p.error;
        }
        o.label = static_cast<int>(choices.size());
        choices.push_back({k2[0], k2[1], k2[2]});
        item.options.push_back(o);
        Group* next = nullptr;
        for (Group& g : parts) {
          if (g.at + 1 < g.hull.size() && (next == nullptr || g.hull[g.at].slope > next->hull[next->at].slope))
            next = &g;
        }
        if (next == nullptr) break;
        ++next->at;
      }
    }
    if (has_native_ && allows_native(bounds)) {
      item.options.push_back(
          {static_cast<int>(choices.size()), kExpertMatrices * errors_.matrix_half_bits(kNativeWidth), 0});
      choices.push_back({kNativeWidth, kNativeWidth, kNativeWidth});
    }
    if (item.options.empty()) {
      return failed_precondition("plan: pins leave no width for expert " + std::to_string(expert) + " of layer " +
                                 std::to_string(layer));
    }
    item.reads = errors_.reads()[out_.allocation.items.size()];
    charge_pins(bounds, item);
    out_.reads += static_cast<ReadBits>(item.reads) * kExpertMatrices * errors_.matrix_weights();
    out_.allocation.items.push_back(std::move(item));
    out_.widths.push_back(std::move(choices));
    return ok_status();
  }

  // What the pins add to the smallest storage and reads, on the account of the pin that is felt.
  void charge_pins(const Bounds& bounds, const AllocationItem& item) {
    int64_t least = item.options[0].half_bits;
    for (const AllocationOption& o : item.options) least = std::min(least, o.half_bits);
    least_bits_ += least;
    least_reads_ += static_cast<ReadBits>(least) * item.reads;
    const int64_t free = kExpertMatrices * errors_.matrix_half_bits(widths_.front());
    free_bits_ += free;
    const auto m = static_cast<size_t>(std::max_element(bounds.low.begin(), bounds.low.end()) - bounds.low.begin());
    if (bounds.low_pin[m] < 0 || least <= free) return;
    pin_bits_[static_cast<size_t>(bounds.low_pin[m])] += least - free;
    pin_reads_[static_cast<size_t>(bounds.low_pin[m])] += static_cast<ReadBits>(least - free) * item.reads;
  }

  Status set_limits() {
    const int64_t routed = errors_.n_experts() * kExpertMatrices * errors_.matrix_weights();
    int64_t counted = routed;
    if (request_.budget_of == BudgetOf::kCard) {
      if (!request_.dense_k2) {
        return invalid_argument(
            "--bpw-of card: expected --dense-bits, because this definition counts attention, shared experts and more; "
            "found none");
      }
      const int64_t dense = card_dense_weights(inputs_.config);
      out_.fixed_half_bits = dense * *request_.dense_k2;
      counted += dense;
    }
    ASSIGN_OR_RETURN(const ReadBits budget, half_bits_at(request_.bpw, counted));
    out_.allocation.storage_limit = static_cast<int64_t>(budget) - out_.fixed_half_bits;
    if (out_.allocation.storage_limit < 0) {
      return failed_precondition("plan: the dense matrices alone pass " + bpw_text(request_.bpw) +
                                 " bits per weight; lower --dense-bits");
    }
    if (request_.read_cap) {
      ASSIGN_OR_RETURN(out_.allocation.read_limit, half_bits_at(*request_.read_cap, out_.reads));
    }
    return ok_status();
  }

  static std::string bpw_text(double bpw) {
    char text[32];
    std::snprintf(text, sizeof text, bpw >= 1e-3 ? "%.4f" : "%.3g", bpw);
    return text;
  }

  template <typename T>
  std::string worst_pins(const std::vector<T>& charges, double per_bit) const {
    std::vector<size_t> order;
    for (size_t p = 0; p < charges.size(); ++p) {
      if (charges[p] > 0) order.push_back(p);
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return charges[a] > charges[b]; });
    std::string out;
    for (size_t k = 0; k < std::min(order.size(), kShownPins); ++k) {
      char added[32];
      std::snprintf(added, sizeof added, ": +%.4f", static_cast<double>(charges[order[k]]) / per_bit);
      out += (k == 0 ? "'" : ", '") + out_.pins[order[k]].text() + "'" + added;
    }
    if (order.size() > kShownPins) out += " and " + std::to_string(order.size() - kShownPins) + " more";
    return out;
  }

  Status check_pins() const {
    const double weights = 2.0 * static_cast<double>(errors_.n_experts() * kExpertMatrices * errors_.matrix_weights());
    if (least_bits_ > out_.allocation.storage_limit) {
      const double least = static_cast<double>(least_bits_) / weights;
      const double budget = static_cast<double>(out_.allocation.storage_limit) / weights;
      const std::string pins = worst_pins(pin_bits_, weights);
      if (pins.empty() || free_bits_ > out_.allocation.storage_limit) {
        return failed_precondition("plan: the narrowest widths of " + widths_text() + " take " + bpw_text(least) +
                                   " bits per routed weight, the budget leaves " + bpw_text(budget) +
                                   "; raise --bpw or allow narrower widths");
      }
      return failed_precondition("plan: the pins alone take " + bpw_text(least) + " bits per routed weight of " +
                                 bpw_text(budget) + ", " + bpw_text(least - budget) + " over: " + pins +
                                 "; free some of them or raise --bpw");
    }
    if (out_.allocation.read_limit && least_reads_ > *out_.allocation.read_limit) {
      const double reads = 2 * static_cast<double>(out_.reads);
      const double least = static_cast<double>(least_reads_) / reads;
      const std::string pins = worst_pins(pin_reads_, reads);
      return failed_precondition("plan: " + std::string(pins.empty() ? "the narrowest widths" : "the pins alone") +
                                 " read " + bpw_text(least) + " bits per weight of " + bpw_text(*request_.read_cap) +
                                 ", " + bpw_text(least - *request_.read_cap) + " over" +
                                 (pins.empty() ? "" : ": " + pins) + "; free some of them or raise --read-cap");
    }
    return ok_status();
  }

  const PlanInputs& inputs_;
  const PlanRequest& request_;
  const ExpertErrors& errors_;
  std::vector<int> widths_;
  bool has_native_ = false;
  std::map<size_t, size_t> super_pins_;  // item -> index into out_.pins
  ExpertProblem out_;
  int64_t least_bits_ = 0, free_bits_ = 0;
  ReadBits least_reads_ = 0;
  std::vector<int64_t> pin_bits_;
  std::vector<ReadBits> pin_reads_;
};

}  // namespace

PackPlan ExpertProblem::plan(const std::vector<int>& choice, const Config& config) const {
  PackPlan out;
  const auto per_layer = static_cast<size_t>(config.n_experts);
  for (size_t i = 0; i < choice.size(); ++i) {
    const auto option = static_cast<size_t>(choice[i]);
    const auto label = static_cast<size_t>(allocation.items[i].options[option].label);
    out.experts[static_cast<int>(i / per_layer)].push_back(widths[i][label]);
  }
  return out;
}

Result<ExpertProblem> make_expert_problem(const PlanInputs& inputs, const PlanRequest& request,
                                          const ExpertErrors& errors) {
  return Builder(inputs, request, errors).build();
}

int64_t card_dense_weights(const Config& config) {
  int64_t out = 0;
  for (const MatrixSpec& m : quantizable_matrices(config)) {
    const std::string_view part = matrix_part(m, config.n_layers);
    if (part != "routed" && part != "head" && part != "drafter") out += m.in * m.out;
  }
  return out;
}

}  // namespace espalier
