// `espalier convert PACK --layout L --out PACK2`: the same tensors in the files of another layout.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "format/json.h"
#include "stages/pack/convert.h"

namespace espalier::app {
namespace {

struct Flags {
  std::string pack, out, engram, checkpoint;
  std::string layout;
  bool leave_tables = false;
  bool copy = false;
};

Result<int> run(const Flags& flags, CommandContext& context) {
  ConvertOptions options;
  ASSIGN_OR_RETURN(options.pack, resolve_model(flags.pack));
  options.out = flags.out;
  options.engram_dir = flags.engram;
  if (!flags.checkpoint.empty()) {
    ASSIGN_OR_RETURN(options.checkpoint, resolve_model(flags.checkpoint));
  }
  options.layout = *pack_layout_from_name(flags.layout);
  options.leave_engram_tables = flags.leave_tables;
  options.copy_files = flags.copy;
  options.tool = std::string("espalier ") + ESPALIER_VERSION;
  ASSIGN_OR_RETURN(const ConvertReport report, convert_pack(options, context.progress));
  if (context.common.json) {
    print_json(dump_json(Json{{"from", layout_name(report.from)},
                              {"layout", flags.layout},
                              {"bpw", report.bpw},
                              {"bytes", report.bytes},
                              {"tensors", report.tensors},
                              {"matrices", report.matrices},
                              {"linked_files", report.linked_files},
                              {"written_files", report.written_files},
                              {"notes", report.notes},
                              {"out", flags.out}}));
    return 0;
  }
  std::printf("%s: %s to %s, %lld tensors, %.2f MB; %lld files written, %lld linked\n", flags.out.c_str(),
              std::string(layout_name(report.from)).c_str(), flags.layout.c_str(), static_cast<long long>(report.tensors),
              static_cast<double>(report.bytes) / 1e6, static_cast<long long>(report.written_files),
              static_cast<long long>(report.linked_files));
  for (const std::string& note : report.notes) std::printf("  note: %s\n", note.c_str());
  return 0;
}

}  // namespace

void add_convert(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* app = table.add("convert", "Another layout of a pack, without touching a bit of its tensors",
                            [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("PACK", flags->pack, "Folder of a pack of any layout")->required();
  app->add_option("--layout", flags->layout, "Layout to write")
      ->required()
      ->check(CLI::IsMember({"exllamav3", "vllm", "tensorfold"}));
  app->add_option("--out", flags->out, "Folder to make; must not exist")->required();
  app->add_option("--engram", flags->engram, "Another folder that holds the Engram shards");
  app->add_option("--checkpoint", flags->checkpoint,
                  "The checkpoint that the pack was made from: adds the image router biases that the pack lacks");
  app->add_flag("--leave-engram", flags->leave_tables, "Do not take the Engram tables along");
  app->add_flag("--copy", flags->copy, "Copy files that stay the same instead of hard-linking them");
}

}  // namespace espalier::app
