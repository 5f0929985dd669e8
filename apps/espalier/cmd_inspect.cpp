// `espalier inspect MODEL`: what is in a folder, from headers only.
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "apps/espalier/inspect_text.h"
#include "format/json.h"
#include "model/folder.h"
#include "model/pack_plan.h"

namespace espalier::app {
namespace {

struct Flags {
  std::string model;
  std::string engram_dir;
  bool plan_memory = false;
  bool layers = false;
  bool heat_map = false;
  int64_t ranks = 1, context = 0, slots = 1;
  double node_gib = 112;
};

Json counts_json(const WidthCounts& counts) {
  Json out = Json::object();
  for (const auto& [k2, count] : counts) out[width_text_of(k2)] = count;
  return out;
}

Json to_json(const Inventory& inventory, const Config& config) {
  Json widths = Json::object(), by_layer = Json::object(), bytes = Json::object(), native = Json::object();
  for (const auto& [part, counts] : inventory.widths) widths[part] = counts_json(counts);
  for (const auto& [block, projections] : inventory.widths_by_block) {
    const std::string prefix = block < 0 ? "" : block_prefix(config, block);
    for (const auto& [projection, counts] : projections) by_layer[prefix + projection] = counts_json(counts);
  }
  for (const auto& [part, size] : inventory.bytes_by_part) bytes[part] = size;
  for (const auto& [part, forms] : inventory.native) native[part] = forms;
  return {{"family", layout_name(inventory.layout)},
          {"n_tensors", inventory.n_tensors},
          {"n_files", inventory.n_files},
          {"bytes", inventory.bytes},
          {"bytes_by_part", bytes},
          {"bpw",
           {{"routed_stored", inventory.bpw_routed_stored},
            {"routed_read", inventory.bpw_routed_read ? Json(*inventory.bpw_routed_read) : Json(nullptr)},
            {"card", inventory.bpw_card}}},
          {"n_matrices", inventory.n_matrices},
          {"n_exl3", inventory.n_exl3},
          {"widths", widths},
          {"widths_by_layer", by_layer},
          {"native", native},
          {"missing", inventory.missing},
          {"unexpected", inventory.unexpected},
          {"missing_files", inventory.missing_files},
          {"notes", inventory.notes},
          {"problems", inventory.problems}};
}

Json to_json(const MemoryPlan& plan) {
  Json weights = Json::object();
  for (const auto& [part, bytes] : plan.weights) weights[part] = bytes;
  return {{"ranks", plan.request.ranks},
          {"context", plan.request.context},
          {"slots", plan.request.slots},
          {"weights", weights},
          {"weight_bytes", plan.weight_bytes},
          {"kv_bytes_per_token", plan.kv_bytes_per_token},
          {"kv_bytes", plan.kv_bytes},
          {"slot_bytes", plan.slot_bytes},
          {"engine_bytes", plan.engine_bytes},
          {"reserve_bytes", plan.reserve_bytes},
          {"total_bytes", plan.total_bytes},
          {"available_bytes", plan.request.available_bytes},
          {"fits", plan.fits},
          {"pool_tokens", plan.pool_tokens}};
}

// Cells of the heat map beside the layer's name and mean.
int heat_columns() {
  winsize size{};
  const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 40;
  return known ? size.ws_col - 20 : 96;
}

Result<int> run(const Flags& flags, CommandContext& context) {
  ASSIGN_OR_RETURN(const std::string dir, resolve_model(flags.model));
  ASSIGN_OR_RETURN(const Config config, load_config(dir));
  ASSIGN_OR_RETURN(const TensorIndex index, open_model_index(dir, flags.engram_dir, true));
  ASSIGN_OR_RETURN(const Inventory inventory, take_inventory(index, config));
  std::optional<MemoryPlan> memory;
  if (flags.plan_memory) {
    MemoryRequest request{flags.ranks, flags.context, flags.slots,
                          static_cast<uint64_t>(flags.node_gib * static_cast<double>(uint64_t{1} << 30))};
    ASSIGN_OR_RETURN(memory, plan_memory(index, config, request));
  }
  if (context.common.json) {
    Json doc = to_json(inventory, config);
    doc["memory"] = memory ? to_json(*memory) : Json(nullptr);
    print_json(dump_json(doc, 2));
    return 0;
  }
  print_inventory(dir, inventory);
  if (flags.layers) print_layers(inventory, config);
  if (flags.heat_map) print_heat_map(inventory, config, heat_columns(), ::isatty(STDOUT_FILENO) == 1);
  if (memory) print_memory(*memory);
  return 0;
}

}  // namespace

void add_inspect(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* app = table.add("inspect", "What is in a model folder, from headers only",
                            [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("MODEL", flags->model, "Checkpoint or pack folder, or 'pocket'")->required();
  app->add_option("--engram", flags->engram_dir, "Folder that holds the Engram shards");
  app->add_flag("--layers", flags->layers, "Widths of every layer and projection");
  app->add_flag("--heat-map", flags->heat_map, "Mean width of every expert, layer by layer");
  app->add_flag("--plan-memory", flags->plan_memory, "What serving it takes per rank");
  app->add_option("--ranks", flags->ranks, "Machines that share the weights");
  app->add_option("--context", flags->context, "Tokens per slot; 0: the model's limit")->check(CLI::NonNegativeNumber);
  app->add_option("--slots", flags->slots, "Requests at the same time");
  app->add_option("--node-gib", flags->node_gib, "Memory of a machine before loading")->check(CLI::Range(0.001, 1e6));
}

}  // namespace espalier::app
