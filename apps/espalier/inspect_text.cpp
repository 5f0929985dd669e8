#include "apps/espalier/inspect_text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "model/pack_plan.h"

namespace espalier::app {
namespace {

std::string counts_text(const WidthCounts& counts) {
  std::string out;
  for (const auto& [k2, count] : counts) {
    out += (out.empty() ? "" : ", ") + width_text_of(k2) + " x " + std::to_string(count);
  }
  return out;
}

void print_list(const char* title, const std::vector<std::string>& names, const char* what = "tensors") {
  if (names.empty()) return;
  std::printf("%s: %zu %s, first %s\n", title, names.size(), what, names.front().c_str());
}

std::string block_name(const Config& config, int block) {
  std::string name = block < 0 ? "head" : block_prefix(config, block);
  if (name.back() == '.') name.pop_back();
  return name;
}

}  // namespace

std::string gib(uint64_t bytes) {
  char buffer[32];
  const double size = static_cast<double>(bytes);
  if (bytes >= (uint64_t{1} << 30)) {
    std::snprintf(buffer, sizeof buffer, "%.2f GiB", size / static_cast<double>(uint64_t{1} << 30));
  } else {
    std::snprintf(buffer, sizeof buffer, "%.2f MiB", size / static_cast<double>(1 << 20));
  }
  return buffer;
}

void print_inventory(const std::string& dir, const Inventory& inventory) {
  std::printf("%s: family %s, %ld tensors in %ld files, %.1f MB\n", dir.c_str(),
              std::string(layout_name(inventory.layout)).c_str(), static_cast<long>(inventory.n_tensors),
              static_cast<long>(inventory.n_files), static_cast<double>(inventory.bytes) / 1e6);
  if (inventory.n_exl3 > 0) {
    std::printf("EXL3: %ld of %ld matrices; %.4f bits per weight (card), %.4f over the routed experts",
                static_cast<long>(inventory.n_exl3), static_cast<long>(inventory.n_matrices), inventory.bpw_card,
                inventory.bpw_routed_stored);
    if (inventory.bpw_routed_read) {
      std::printf(", %.4f as read (%s)", *inventory.bpw_routed_read, inventory.read_source.c_str());
    }
    std::printf("\n");
  }
  for (const auto& [part, size] : inventory.bytes_by_part) {
    std::printf("  %-14s %10.2f MB", part.c_str(), static_cast<double>(size) / 1e6);
    if (const auto it = inventory.widths.find(part); it != inventory.widths.end()) {
      std::printf("   widths: %s", counts_text(it->second).c_str());
    }
    if (const auto it = inventory.native.find(part); it != inventory.native.end()) {
      std::printf("   native:");
      for (const auto& [form, count] : it->second) std::printf(" %s x %ld", form.c_str(), static_cast<long>(count));
    }
    std::printf("\n");
  }
  print_list("missing", inventory.missing);
  print_list("unexpected", inventory.unexpected);
  print_list("missing files", inventory.missing_files, "files");
  for (const std::string& problem : inventory.problems) std::printf("problem: %s\n", problem.c_str());
  print_list("notes", inventory.notes, "lines");
}

void print_layers(const Inventory& inventory, const Config& config) {
  for (const auto& [block, projections] : inventory.widths_by_block) {
    std::printf("%s\n", block_name(config, block).c_str());
    for (const auto& [projection, counts] : projections) {
      std::printf("  %-24s %s\n", projection.c_str(), counts_text(counts).c_str());
    }
  }
}

void print_heat_map(const Inventory& inventory, const Config& config, int columns, bool colour) {
  // Cold to hot in the 256-colour cube, 1 to 8 bits.
  static constexpr int kColours[] = {236, 17, 25, 37, 71, 142, 166, 160, 196};
  size_t n_experts = 0;
  for (const auto& [block, bits] : inventory.expert_bits) n_experts = std::max(n_experts, bits.size());
  if (n_experts == 0 || inventory.n_exl3 == 0) return;
  const size_t per_cell = (n_experts + static_cast<size_t>(columns) - 1) / static_cast<size_t>(columns);
  std::printf("mean width per layer and expert (%zu expert%s a cell; . native)\n", per_cell, per_cell == 1 ? "" : "s");
  for (const auto& [block, bits] : inventory.expert_bits) {
    std::printf("%-10s ", block_name(config, block).c_str());
    double sum = 0;
    for (size_t begin = 0; begin < bits.size(); begin += per_cell) {
      const size_t end = std::min(begin + per_cell, bits.size());
      double mean = 0;
      for (size_t e = begin; e < end; ++e) mean += bits[e] / static_cast<double>(end - begin);
      const int level = std::clamp(static_cast<int>(std::lround(mean)), 0, 8);
      const char digit = level == 0 ? '.' : static_cast<char>('0' + level);
      if (colour) std::printf("\033[48;5;%dm%c", kColours[level], digit);
      else std::putchar(digit);
    }
    for (const double b : bits) sum += b;
    std::printf("%s %.3f\n", colour ? "\033[0m" : "", sum / static_cast<double>(bits.size()));
  }
}

void print_memory(const MemoryPlan& plan) {
  const MemoryRequest& r = plan.request;
  std::printf("memory per rank: %lld rank%s, %lld tokens x %lld slot%s\n", static_cast<long long>(r.ranks), r.ranks == 1 ? "" : "s",
              static_cast<long long>(r.context), static_cast<long long>(r.slots), r.slots == 1 ? "" : "s");
  for (const auto& [part, bytes] : plan.weights) std::printf("  %-14s %12s\n", part.c_str(), gib(bytes).c_str());
  std::printf("  %-14s %12s\n", "weights", gib(plan.weight_bytes).c_str());
  std::printf("  %-14s %12s   %.0f bytes a token\n", "KV and index", gib(plan.kv_bytes).c_str(), plan.kv_bytes_per_token);
  std::printf("  %-14s %12s\n", "slots", gib(plan.slot_bytes).c_str());
  std::printf("  %-14s %12s   workspace, runtime, sessions, staging\n", "engine", gib(plan.engine_bytes).c_str());
  std::printf("  %-14s %12s\n", "total", gib(plan.total_bytes).c_str());
  std::printf("  %-14s %12s   of %s, keeping %s free; room for %lld tokens in all\n", plan.fits ? "fits" : "does not fit", "",
              gib(r.available_bytes).c_str(), gib(plan.reserve_bytes).c_str(), static_cast<long long>(plan.pool_tokens));
}

}  // namespace espalier::app
