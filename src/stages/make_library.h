// A width library from a checkpoint and a calibration set: every routed expert at every width asked for, the rest at one.
//
// `espalier plan` reads the errors that it measured (errors.safetensors in the same folder), `espalier quantize --library` makes a
// pack of any plan by lookup. Building goes on where it was stopped. Source: quality.md 9.3; docs/formats/library.md.
#pragma once

#include <filesystem>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "stages/make_pack.h"
#include "stages/quantize/width_library.h"

namespace espalier {

struct MakeLibraryReport {
  int64_t matrices = 0;  // in the library, all widths
  uint64_t bytes = 0;    // of the folder
};

// options: as for a pack; `library` is the folder, `out`, `layout` and `plan` are not used. widths: half bits, each one that the
// codebook has. Errors: as make_pack; failed_precondition when the folder holds a library of other inputs or options.
Result<MakeLibraryReport> make_library(const MakePackOptions& options, const std::vector<int>& widths, Progress& progress,
                                       ThreadPool& pool);

// The library of the options, opened; its key says what its bytes depend on. data: the rows that are used. Errors: those of
// WidthLibrary::open.
Result<WidthLibrary> open_library(const MakePackOptions& options, const Dataset& data);

}  // namespace espalier
