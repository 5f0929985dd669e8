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

namespace espalier::app {
namespace {

struct Flags {
  std::string model, engram, lock;
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
  ASSIGN_OR_RETURN(const VerifyReport found, verify_folder(dir, flags.engram, context.progress, context.pool));
  return report(Json{{"ok", found.problems.empty()},
                     {"problems", found.problems},
                     {"rederived", 0},
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
}

}  // namespace espalier::app
