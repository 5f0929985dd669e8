// espalier library: every routed expert at several widths, encoded once, so that any plan becomes a pack by lookup.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "apps/espalier/encode_flags.h"
#include "codec/viterbi.h"
#include "format/json.h"
#include "stages/make_library.h"

namespace espalier::app {
namespace {

struct Flags {
  std::string checkpoint, data, out, engram;
  std::vector<double> widths = {2, 3, 4, 5};
  EncodeFlags encode;
  int64_t rows = 0;
};

Result<int> run(const Flags& flags, CommandContext& context) {
  MakePackOptions options;
  ASSIGN_OR_RETURN(options.checkpoint, resolve_model(flags.checkpoint));
  options.data = flags.data;
  options.engram_dir = flags.engram;
  options.library = flags.out;
  options.rows = flags.rows;
  options.tool = std::string("espalier ") + ESPALIER_VERSION;
  std::vector<int> widths;
  for (const double bits : flags.widths) {
    auto k2 = codec::width_from_bits(bits);
    if (!k2.ok()) return std::move(k2).error().with_context("--widths");
    widths.push_back(*k2);
  }
  options.quantize.bits = flags.widths.front();
  RETURN_IF_ERROR(take_encode_flags(flags.encode, context.common, &options.quantize));
  options.quantize.stream = StreamFrom::kNative;
  options.quantize.encode.w2_input = W2Input::kNative;
  for (const int k2 : widths) {
    if (codec::is_searchable_width(k2, options.quantize.encode.codec.codebook)) continue;
    return invalid_argument("--widths: the codebook has no width of " + width_text_of(k2) + " bits");
  }
  const auto start = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const MakeLibraryReport report, make_library(options, widths, context.progress, context.pool));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (context.common.json) {
    print_json(dump_json(Json{{"out", flags.out}, {"matrices", report.matrices}, {"bytes", report.bytes}, {"seconds", seconds}}));
  } else {
    std::printf("%s: %lld matrices, %.2f MB, %.0f s\n", flags.out.c_str(), static_cast<long long>(report.matrices),
                static_cast<double>(report.bytes) / 1e6, seconds);
  }
  return 0;
}

}  // namespace

void add_library(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* app = table.add("library", "Encodes every routed expert at several widths from the native stream, for quantize --library",
                            [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("checkpoint", flags->checkpoint, "Folder of the official checkpoint, or 'pocket'")->required();
  app->add_option("--widths", flags->widths, "Widths of the routed experts in bits: 1 to 8; with mul1 also 1.5, 2.5, 3.5")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--data", flags->data, "Calibration set (JSON lines)")->required();
  app->add_option("--out", flags->out, "Folder of the library; one that is there is gone on with")->required();
  app->add_option("--rows", flags->rows, "Use at most so many rows, spread over the set; 0 = all")->check(CLI::NonNegativeNumber);
  app->add_option("--engram", flags->engram, "Another folder that holds the Engram shards");
  add_encode_flags(app, &flags->encode);
}

}  // namespace espalier::app
