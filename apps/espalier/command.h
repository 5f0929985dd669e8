// A subcommand of the program: adds its flags to CLI11's tree and returns what to run.
//
// Every command lives in cmd_<name>.cpp, defines `void add_<name>(CommandTable&)` and is listed in main.cpp. The body returns a
// Status or an exit code; errors are printed by main as one line `espalier: error: …` and mapped to the contract's exit codes
// (0 done, 1 a check did not hold, 2 usage, 3 bad data, 4 resource missing, 5 internal).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/products.h"

namespace CLI {
class App;
}

namespace espalier::app {

// Flags that every command has, filled before the command runs.
struct CommonOptions {
  bool json = false;         // exactly one JSON document on stdout, nothing else there
  bool quiet = false;        // no progress
  int threads = 0;           // 0: all usable CPUs
  uint64_t seed = 0;
  std::string device = "";   // "", "cpu", "cuda", "cuda:N"; empty: cuda when usable, else cpu
  std::string log_level = "warning";
};

// What a running command is given.
struct CommandContext {
  const CommonOptions& common;
  ThreadPool& pool;
  Progress& progress;  // bar with ETA on a terminal, plain lines when piped, silent with --quiet; cancelled by Ctrl-C
};

// The value is the exit code of a command that ran: 0, or 1 when a check that it exists to make did not hold.
using CommandBody = std::function<Result<int>(CommandContext&)>;

class CommandTable {
 public:
  explicit CommandTable(CLI::App& root) : root_(root) {}
  // Registers a subcommand (the common flags are added to it). The caller adds its own options to the returned app, binding
  // them to storage that `body` keeps alive (a shared_ptr to an options struct).
  CLI::App* add(const std::string& name, const std::string& help, CommandBody body);
  // A subcommand of a subcommand: `espalier exl3 decode`.
  CLI::App* add_group(const std::string& name, const std::string& help);
  CLI::App* add_to(CLI::App* group, const std::string& name, const std::string& help, CommandBody body);

  // The command `app` asks choose_device; the others refuse --device cuda.
  void runs_on_gpu(CLI::App* app);

  struct Entry {
    CLI::App* app;
    CommandBody body;
    bool runs_on_gpu = false;
  };
  const std::vector<Entry>& entries() const { return entries_; }
  CommonOptions& common() { return common_; }

 private:
  CLI::App& root_;
  CommonOptions common_;
  std::vector<Entry> entries_;
};

// --device -> a GPU's index, or absent for the CPU. Without the flag: the first GPU when one is usable and products are not int8, else the
// CPU. Errors: unavailable, saying why, when a GPU is asked for and there is none; invalid_argument for another text or number.
Result<std::optional<int>> choose_device(const CommonOptions& common, Products products);

// MODEL argument -> folder: "pocket" names the bundled model (models/pocket beside the program's source or install).
Result<std::string> resolve_model(const std::string& argument);

// Before any work: `out` can be written (base/file.h) and is none of the inputs, under whatever name.
Status check_output(const std::string& out, const std::vector<std::string>& inputs);

// Writes one JSON document, already serialised, and a newline to stdout.
void print_json(const std::string& document);

}  // namespace espalier::app
