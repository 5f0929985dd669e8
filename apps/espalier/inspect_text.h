// Tables and the heat map of `espalier inspect`.
#pragma once

#include <string>

#include "model/config.h"
#include "model/inventory.h"
#include "model/memory_plan.h"

namespace espalier::app {

// "12.3 GiB", "4.5 MB": as sizes of memory and of files are usually given.
std::string gib(uint64_t bytes);

void print_inventory(const std::string& dir, const Inventory& inventory);
// One line per layer: widths per projection.
void print_layers(const Inventory& inventory, const Config& config);
// Layer x expert, experts side by side in at most `columns` cells, each the mean width of its experts as a digit (on a
// terminal also as a colour).
void print_heat_map(const Inventory& inventory, const Config& config, int columns, bool colour);
void print_memory(const MemoryPlan& plan);

}  // namespace espalier::app
