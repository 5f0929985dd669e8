// `espalier inspect MODEL`: what is in a folder, from headers only.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "format/json.h"
#include "model/inventory.h"

namespace espalier::app {
namespace {

struct Options {
  std::string model;
  std::string engram_dir;
};

std::string width_text(int k2) { return k2 % 2 == 0 ? std::to_string(k2 / 2) : std::to_string(k2 / 2) + ".5"; }

Json to_json(const Inventory& inventory) {
  Json widths = Json::object();
  for (const auto& [part, histogram] : inventory.widths) {
    for (const auto& [k2, count] : histogram) widths[part][width_text(k2)] = count;
  }
  Json bytes = Json::object();
  for (const auto& [part, size] : inventory.bytes_by_part) bytes[part] = size;
  return {{"family", layout_name(inventory.layout)},
          {"n_tensors", inventory.n_tensors},
          {"n_files", inventory.n_files},
          {"bytes", inventory.bytes},
          {"bytes_by_part", bytes},
          {"bpw", {{"routed_stored", inventory.bpw_routed_stored}, {"card", inventory.bpw_card}}},
          {"n_matrices", inventory.n_matrices},
          {"n_exl3", inventory.n_exl3},
          {"widths", widths},
          {"missing", inventory.missing},
          {"unexpected", inventory.unexpected},
          {"missing_files", inventory.missing_files},
          {"notes", inventory.notes},
          {"problems", inventory.problems}};
}

void print_list(const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return;
  std::printf("%s: %zu tensors, first %s\n", title, names.size(), names.front().c_str());
}

void print_text(const std::string& dir, const Inventory& inventory) {
  std::printf("%s: family %s, %ld tensors in %ld files, %.1f MB\n", dir.c_str(), std::string(layout_name(inventory.layout)).c_str(),
              static_cast<long>(inventory.n_tensors), static_cast<long>(inventory.n_files),
              static_cast<double>(inventory.bytes) / 1e6);
  if (inventory.n_exl3 > 0) {
    std::printf("EXL3: %ld of %ld matrices; %.4f bits per weight (card), %.4f over the routed experts\n",
                static_cast<long>(inventory.n_exl3), static_cast<long>(inventory.n_matrices), inventory.bpw_card,
                inventory.bpw_routed_stored);
  }
  for (const auto& [part, size] : inventory.bytes_by_part) {
    std::printf("  %-14s %10.2f MB", part.c_str(), static_cast<double>(size) / 1e6);
    if (const auto it = inventory.widths.find(part); it != inventory.widths.end()) {
      std::printf("   widths:");
      for (const auto& [k2, count] : it->second) std::printf(" %s x %ld", width_text(k2).c_str(), static_cast<long>(count));
    }
    std::printf("\n");
  }
  print_list("missing", inventory.missing);
  print_list("unexpected", inventory.unexpected);
}

}  // namespace

void add_inspect(CommandTable& table) {
  auto options = std::make_shared<Options>();
  CLI::App* app = table.add("inspect", "What is in a model folder, from headers only", [options](CommandContext& context) -> Result<int> {
    ASSIGN_OR_RETURN(const std::string dir, resolve_model(options->model));
    ASSIGN_OR_RETURN(const Inventory inventory, take_inventory(dir, options->engram_dir));
    if (context.common.json) print_json(dump_json(to_json(inventory), 2));
    else print_text(dir, inventory);
    return 0;
  });
  app->add_option("MODEL", options->model, "Checkpoint or pack folder, or 'pocket'")->required();
  app->add_option("--engram", options->engram_dir, "Folder that holds the Engram shards");
}

}  // namespace espalier::app
