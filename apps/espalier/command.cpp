#include "apps/espalier/command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <filesystem>

#include "base/file.h"
#include "device/device.h"

namespace espalier::app {

CLI::App* CommandTable::add(const std::string& name, const std::string& help, CommandBody body) {
  return add_to(&root_, name, help, std::move(body));
}

CLI::App* CommandTable::add_group(const std::string& name, const std::string& help) {
  CLI::App* group = root_.add_subcommand(name, help);
  group->require_subcommand(1);
  return group;
}

CLI::App* CommandTable::add_to(CLI::App* group, const std::string& name, const std::string& help, CommandBody body) {
  CLI::App* app = group->add_subcommand(name, help);
  app->add_flag("--json", common_.json, "Print exactly one JSON document on stdout")->group("Common");
  app->add_flag("--quiet", common_.quiet, "No progress on stderr")->group("Common");
  app->add_option("--threads", common_.threads, "Threads; 0 = all usable CPUs")->group("Common");
  app->add_option("--seed", common_.seed, "Seed of everything random")
      ->check(CLI::Validator(
          [](std::string& text) {
            uint64_t seed = 0;  // the library takes what is too large for the largest number
            const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
            return error == std::errc() && end == text.data() + text.size()
                       ? std::string()
                       : "expected a whole number from 0 to 18446744073709551615, found '" + text + "'";
          },
          ""))
      ->group("Common");
  app->add_option("--device", common_.device, "cpu, cuda or cuda:N")->group("Common");
  app->add_option("--log-level", common_.log_level, "debug, info, warning or error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->group("Common");
  entries_.push_back({app, std::move(body), false});
  return app;
}

void CommandTable::runs_on_gpu(CLI::App* app) {
  for (Entry& entry : entries_) {
    if (entry.app == app) entry.runs_on_gpu = true;
  }
}

Result<std::optional<int>> choose_device(const CommonOptions& common, Products products) {
  if (common.device == "cpu") return std::optional<int>();
  if (common.device.empty()) {
    return products != Products::kInt8 && device::list_devices().ok() ? std::optional<int>(0) : std::optional<int>();
  }
  int index = 0;
  const std::string number = common.device == "cuda" ? "0" : common.device.substr(0, 5) == "cuda:" ? common.device.substr(5) : "";
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
  if (number.empty() || error != std::errc() || end != number.data() + number.size()) {
    return invalid_argument("--device: expected cpu, cuda or cuda:N, found '" + common.device + "'");
  }
  auto found = device::find_device(index);
  if (!found.ok()) return std::move(found).error().with_context("--device " + common.device);
  return std::optional<int>(index);
}

Result<std::string> resolve_model(const std::string& argument) {
  namespace fs = std::filesystem;
  std::error_code ec;
  if (argument == "pocket" && !fs::is_directory(argument, ec)) {
    const fs::path program = fs::read_symlink("/proc/self/exe", ec);
    for (const fs::path& place : {fs::path(ESPALIER_SOURCE_DIR) / "models/pocket",
                                  program.parent_path() / "../share/espalier/models/pocket"}) {
      if (fs::is_directory(place, ec)) return place.string();
    }
    return not_found("model 'pocket': the bundled model is not beside the program; name its folder instead");
  }
  if (!fs::is_directory(argument, ec)) {
    return not_found("model '" + argument + "': expected a folder with a checkpoint or a pack, or 'pocket'; found " +
                     (fs::exists(argument, ec) ? "a file" : "nothing there"));
  }
  return argument;
}

Status check_output(const std::string& out, const std::vector<std::string>& inputs) {
  RETURN_IF_ERROR(check_output_file(out));
  std::error_code ec;
  for (const std::string& input : inputs) {
    if (std::filesystem::equivalent(out, input, ec)) {
      return failed_precondition("output '" + out + "' is the input '" + input + "'; name another file");
    }
  }
  return ok_status();
}

void print_json(const std::string& document) {
  std::fwrite(document.data(), 1, document.size(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

}  // namespace espalier::app
