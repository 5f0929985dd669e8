// The program: parses the command line, runs one subcommand, maps its outcome to the contract's exit codes.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <system_error>

#include "apps/espalier/command.h"
#include "apps/espalier/console.h"
#include "text/utf8.h"

namespace espalier::app {

void add_tokenize(CommandTable&);
void add_logits(CommandTable&);
void add_exl3(CommandTable&);
void add_quantize(CommandTable&);
void add_eval(CommandTable&);
void add_generate(CommandTable&);
void add_serve(CommandTable&);
void add_inspect(CommandTable&);
void add_convert(CommandTable&);
void add_verify(CommandTable&);
void add_plan(CommandTable&);
void add_calibrate(CommandTable&);
void add_panel(CommandTable&);
void add_library(CommandTable&);
void add_sensitivity(CommandTable&);

namespace {

int exit_code(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return 0;
    case StatusCode::kInvalidArgument: return 2;
    case StatusCode::kNotFound:
    case StatusCode::kDataLoss:
    case StatusCode::kUnimplemented:  // data of a kind that this program does not handle
    case StatusCode::kFailedPrecondition: return 3;
    case StatusCode::kResourceExhausted:
    case StatusCode::kUnavailable:
    case StatusCode::kDeadlineExceeded:
    case StatusCode::kCancelled: return 4;
    case StatusCode::kInternal: return 5;
  }
  return 5;
}

// One line of valid UTF-8 without control characters, whatever the message holds: it may quote the bytes of a damaged file.
void print_error(const std::string& bytes) {
  std::string message = to_valid_utf8(bytes);
  for (char& c : message) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  std::fprintf(stderr, "espalier: error: %s\n", message.c_str());
}

int run(int argc, char** argv) {
  CLI::App root{"Espalier: quantizes DeepSeek-V4.1-Flash to EXL3, proves how close the result is, and serves it."};
  root.set_version_flag("--version", std::string("espalier ") + ESPALIER_VERSION);
  root.require_subcommand(1);
  CommandTable table(root);
#ifdef ESPALIER_HAS_INSPECT
  add_inspect(table);
#endif
#ifdef ESPALIER_HAS_LOGITS
  add_logits(table);
#endif
#ifdef ESPALIER_HAS_GENERATE
  add_generate(table);
#endif
#ifdef ESPALIER_HAS_TOKENIZE
  add_tokenize(table);
#endif
#ifdef ESPALIER_HAS_EXL3
  add_exl3(table);
#endif
#ifdef ESPALIER_HAS_LIBRARY
  add_library(table);
#endif
#ifdef ESPALIER_HAS_SENSITIVITY
  add_sensitivity(table);
#endif
#ifdef ESPALIER_HAS_CALIBRATE
  add_calibrate(table);
#endif
#ifdef ESPALIER_HAS_PANEL
  add_panel(table);
#endif
#ifdef ESPALIER_HAS_PLAN
  add_plan(table);
#endif
#ifdef ESPALIER_HAS_QUANTIZE
  add_quantize(table);
#endif
#ifdef ESPALIER_HAS_CONVERT
  add_convert(table);
#endif
#ifdef ESPALIER_HAS_VERIFY
  add_verify(table);
#endif
#ifdef ESPALIER_HAS_EVAL
  add_eval(table);
#endif
#ifdef ESPALIER_HAS_SERVE
  add_serve(table);
#endif

  try {
    root.parse(argc, argv);
  } catch (const CLI::CallForHelp& e) {
    return root.exit(e);
  } catch (const CLI::CallForAllHelp& e) {
    return root.exit(e);
  } catch (const CLI::CallForVersion& e) {
    return root.exit(e);
  } catch (const CLI::ParseError& e) {
    print_error(std::string(e.what()) + "; see 'espalier --help'");
    return 2;
  }

  const CommonOptions& common = table.common();
  const bool names_gpu = common.device == "cuda" || common.device.rfind("cuda:", 0) == 0;
  if (!common.device.empty() && common.device != "cpu" && !names_gpu) {
    print_error("--device: expected cpu, cuda or cuda:N, found '" + common.device + "'");
    return 2;
  }
  if (common.threads < 0 || common.threads > 1024) {
    print_error("--threads: expected 0 (all) to 1024, found " + std::to_string(common.threads));
    return 2;
  }
  for (const CommandTable::Entry& entry : table.entries()) {
    if (!entry.app->parsed()) continue;
    if (names_gpu && !entry.runs_on_gpu) {
      print_error("--device " + common.device + ": '" + entry.app->get_name() + "' runs on the CPU only; use --device cpu");
      return 4;
    }
    const auto sink = install_console_log(common);
    ThreadPool pool(common.threads);
    const auto progress = make_console_progress(common);
    CommandContext context{common, pool, *progress};
    Result<int> result = entry.body(context);
    progress->finish();
    if (result.ok() && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
      result = resource_exhausted("cannot write to standard output; the result is incomplete");
    }
    if (result.ok()) return *result;
    print_error(result.error().message());
    return exit_code(result.error().code());
  }
  print_error("no subcommand given; see 'espalier --help'");
  return 2;
}

}  // namespace
}  // namespace espalier::app

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is then an error of write, which cleans up
  try {
    return espalier::app::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "espalier: error: out of memory; close other programs or use a smaller model\n");
    return 4;
  } catch (const std::system_error& e) {
    std::fprintf(stderr, "espalier: error: the system refused a resource (%s); use fewer --threads or raise the limit\n", e.what());
    return 4;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "espalier: error: internal: %s\n", e.what());
    return 5;
  }
}
