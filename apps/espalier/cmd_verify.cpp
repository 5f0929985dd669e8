// `espalier verify PACK`: is the folder what it says it is? `verify CKPT --lock source.lock.json`: is it the checkpoint that
// a pack was made from?
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "base/file.h"
#include "format/json.h"
#include "stages/pack/verify.h"
#include "stages/provenance.h"
#include "stages/rederive.h"

namespace espalier::app {
namespace {

struct Flags {
  std::string model, engram, lock;
  std::string checkpoint, data;
  int64_t rederive = 0;
};

// Prints the outcome; exit code 1 when something did not hold.
int report(const Json& doc, const std::string& model, const CommandContext& context) {
  const bool ok = doc["ok"].get<bool>();
  if (context.common.json) {
    print_json(dump_json(doc));
    return ok ? 0 : 1;
  }
  for (const Json& problem : doc["problems"]) std::printf("problem: %s\n", problem.get<std::string>().c_str());
  if (doc.contains("notes")) {
    for (const Json& note : doc["notes"]) std::printf("note: %s\n", note.get<std::string>().c_str());
  }
  std::printf("%s: %s\n", model.c_str(), ok ? "ok" : (std::to_string(doc["problems"].size()) + " problems").c_str());
  return ok ? 0 : 1;
}

Result<int> verify_lock(const Flags& flags, const std::string& dir, CommandContext& context) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(flags.lock, 64u << 20));
  ASSIGN_OR_RETURN(const std::vector<FileRecord> lock, parse_source_lock(text, "'" + flags.lock + "'"));
  ASSIGN_OR_RETURN(const std::vector<std::string> problems, check_source_lock(dir, flags.engram, lock, context.progress));
  return report(Json{{"ok", problems.empty()}, {"problems", problems}, {"files", lock.size()}}, flags.model, context);
}

Result<int> run(const Flags& flags, CommandContext& context) {
  ASSIGN_OR_RETURN(const std::string dir, resolve_model(flags.model));
  if (!flags.lock.empty()) return verify_lock(flags, dir, context);
  if (flags.rederive > 0 && (flags.checkpoint.empty() || flags.data.empty())) {
    return invalid_argument("--rederive: expected --checkpoint CKPT and --data D as well, found only one or none of them");
  }
  ASSIGN_OR_RETURN(VerifyReport found, verify_folder(dir, flags.engram, context.progress, context.pool));
  size_t rederived = 0;
  if (flags.rederive > 0 && !found.problems.empty()) {
    found.notes.push_back("nothing was encoded again: the pack itself is not in order");
  } else if (flags.rederive > 0) {
    RederiveOptions options;
    options.pack = dir;
    ASSIGN_OR_RETURN(options.checkpoint, resolve_model(flags.checkpoint));
    options.data = flags.data;
    options.engram_dir = flags.engram;
    options.count = flags.rederive;
    options.seed = context.common.seed;
    ASSIGN_OR_RETURN(const RederiveReport again, rederive(options, context.progress, context.pool));
    rederived = again.stems.size();
    found.problems.insert(found.problems.end(), again.problems.begin(), again.problems.end());
    if (!context.common.json) std::printf("%zu matrices encoded again from the checkpoint\n", rederived);
  }
  return report(Json{{"ok", found.problems.empty()},
                     {"problems", found.problems},
                     {"rederived", rederived},
                     {"family", layout_name(found.layout)},
                     {"tensors", found.n_tensors},
                     {"matrices", found.n_matrices},
                     {"digests", found.n_digests},
                     {"notes", found.notes}},
                flags.model, context);
}

}  // namespace

void add_verify(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* app = table.add("verify", "Checks a pack or checkpoint: manifest, coverage, format, digests, side files",
                            [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("MODEL", flags->model, "Pack or checkpoint folder, or 'pocket'")->required();
  app->add_option("--engram", flags->engram, "Another folder that holds the Engram shards");
  app->add_option("--lock", flags->lock, "source.lock.json of a pack: is MODEL the checkpoint that it was made from?");
  app->add_option("--rederive", flags->rederive, "Encode so many random matrices again and compare bytes (--seed draws others)")
      ->check(CLI::PositiveNumber);
  app->add_option("--checkpoint", flags->checkpoint, "With --rederive: the checkpoint that the pack was made from");
  app->add_option("--data", flags->data, "With --rederive: the calibration set of the run");
}

}  // namespace espalier::app
