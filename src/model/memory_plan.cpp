#include "model/memory_plan.h"

#include <algorithm>
#include <unordered_set>

#include "model/coverage.h"

namespace espalier {
namespace {

constexpr int64_t kSplitBlock = 128;  // the rotations' block: no split inside one
// Published terms of an engine on a 128 GB node, per rank: workspace 4.0, runtime 1.0, sessions 0.25, staging 0.125 GiB; 5 GiB
// stay free.
constexpr uint64_t kEngineBytes = (uint64_t{1} << 30) * 43 / 8;
constexpr uint64_t kReserveBytes = uint64_t{5} << 30;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Split { kNone, kOutputs, kInputs, kGroups };

Split split_of(MatrixKind kind) {
  switch (kind) {
    case MatrixKind::kExpertW1:
    case MatrixKind::kExpertW3:
    case MatrixKind::kSharedW1:
    case MatrixKind::kSharedW3:
    case MatrixKind::kWqB:
    case MatrixKind::kHead:
      return Split::kOutputs;
    case MatrixKind::kExpertW2:
    case MatrixKind::kSharedW2:
    case MatrixKind::kWoB:
      return Split::kInputs;
    case MatrixKind::kWoA:
      return Split::kGroups;
    default:
      return Split::kNone;
  }
}

class Planner {
 public:
  Planner(const TensorIndex& index, const Config& config, int64_t ranks) : index_(index), config_(config), ranks_(ranks) {}

  std::map<std::string, uint64_t> weights() {
    for (const MatrixSpec& m : all_matrices(config_)) add_matrix(m);
    for (const std::string& name : index_.names()) {
      if (used_.count(name) != 0) continue;
      if (name.find(".engram.embed.") != std::string::npos) continue;
      const bool is_embedding = name == "embed.weight";
      const std::string part = is_embedding ? "embedding" : is_ignored_name(name) ? "vision" : "other";
      add(name, part, is_embedding ? share(config_.vocab) : 1.0);
    }
    return std::move(parts_);
  }

 private:
  // Part of `size` channels that the first rank holds.
  double share(int64_t size) const {
    const int64_t first = std::min(size, ceil_div(ceil_div(size, kSplitBlock), ranks_) * kSplitBlock);
    return static_cast<double>(first) / static_cast<double>(size);
  }

  void add(const std::string& name, const std::string& part, double fraction) {
    const auto view = index_.find(name);
    if (!view || !used_.insert(name).second) return;
    parts_[part] += static_cast<uint64_t>(static_cast<double>(view->size_bytes()) * fraction + 0.5);
  }

  void add_matrix(const MatrixSpec& m) {
    const std::string part(matrix_part(m, config_.n_layers));
    const Split split = split_of(m.kind);
    const double out = split == Split::kOutputs ? share(m.out) : 1.0;
    const double in = split == Split::kInputs ? share(m.in) : 1.0;
    const int64_t groups = ceil_div(config_.o_groups, ranks_);
    const std::string stem = exl3_stem(index_, m);
    if (stem.empty()) {
      const std::string name = native_name(m);
      const double whole = split == Split::kGroups ? static_cast<double>(groups) / static_cast<double>(config_.o_groups) : in * out;
      add(name, part, whole);
      add(name.substr(0, name.size() - 7) + ".scale", part, whole);
      return;
    }
    const double mine = split == Split::kGroups && m.group >= groups ? 0.0 : 1.0;
    add(stem + ".trellis", part, mine * in * out);
    for (const char* suffix : {".suh", ".su"}) add(stem + suffix, part, mine * in);
    for (const char* suffix : {".svh", ".sv"}) add(stem + suffix, part, mine * out);
    for (const char* suffix : {".mul1", ".mcg"}) add(stem + suffix, part, mine);
  }

  const TensorIndex& index_;
  const Config& config_;
  const int64_t ranks_;
  std::map<std::string, uint64_t> parts_;
  std::unordered_set<std::string> used_;
};

// One cached position: FP8 channels without position, bf16 rotated ones, one scale per 64 channels in whole 8 bytes.
int64_t kv_row_bytes(const Config& c) {
  const int64_t plain = c.head_dim - c.rope_dim;
  return plain + 2 * c.rope_dim + 8 * ceil_div(ceil_div(plain, 64), 8);
}

}  // namespace

Result<MemoryPlan> plan_memory(const TensorIndex& index, const Config& c, const MemoryRequest& request) {
  MemoryPlan plan;
  plan.request = request;
  if (plan.request.context == 0) plan.request.context = c.max_positions;
  if (request.ranks < 1 || request.ranks > c.o_groups) {
    return invalid_argument("--ranks: expected 1 to " + std::to_string(c.o_groups) +
                            " (the groups of attn.wo_a), found " + std::to_string(request.ranks));
  }
  if (plan.request.context < 1 || plan.request.context > c.max_positions) {
    return invalid_argument("--context: expected 1 to " + std::to_string(c.max_positions) + " tokens, found " +
                            std::to_string(request.context));
  }
  if (request.slots < 1 || request.slots > 4096) {
    return invalid_argument("--slots: expected 1 to 4096, found " + std::to_string(request.slots));
  }
  plan.weights = Planner(index, c, request.ranks).weights();
  for (const auto& [part, bytes] : plan.weights) plan.weight_bytes += bytes;
  for (const int layer : c.kv_sources) {
    plan.kv_bytes_per_token += static_cast<double>(kv_row_bytes(c) + c.index_head_dim + 4) / c.ratio(layer);
  }
  const double tokens = static_cast<double>(plan.request.context) * static_cast<double>(request.slots);
  plan.kv_bytes = static_cast<uint64_t>(plan.kv_bytes_per_token * tokens);
  const int64_t rings = (c.n_layers + c.drafter.n_stages) * 2 * c.window * kv_row_bytes(c);
  const int64_t taps = c.window * static_cast<int64_t>(c.drafter.target_layers.size()) * c.d_model * 2;
  plan.slot_bytes = static_cast<uint64_t>(request.slots * (rings + taps));
  plan.engine_bytes = kEngineBytes;
  plan.reserve_bytes = kReserveBytes;
  const uint64_t fixed = plan.weight_bytes + plan.slot_bytes + plan.engine_bytes;
  plan.total_bytes = fixed + plan.kv_bytes;
  plan.fits = plan.total_bytes + plan.reserve_bytes <= request.available_bytes;
  if (fixed + plan.reserve_bytes < request.available_bytes && plan.kv_bytes_per_token > 0) {
    plan.pool_tokens = static_cast<int64_t>(static_cast<double>(request.available_bytes - fixed - plan.reserve_bytes) /
                                            plan.kv_bytes_per_token);
  }
  return plan;
}

}  // namespace espalier
