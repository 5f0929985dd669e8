#include "stages/make_library.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "format/json.h"
#include "model/dataset.h"
#include "model/routing_statistics.h"
#include "stages/provenance.h"
#include "stages/run_files.h"
#include "stages/run_record.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

// True errors of the routed experts of the backbone at every width that the library was asked for.
Result<MatrixErrors> errors_of(const WidthLibrary& library, const Config& config, std::vector<int> widths) {
  std::sort(widths.begin(), widths.end());
  widths.erase(std::unique(widths.begin(), widths.end()), widths.end());
  MatrixErrors out;
  out.widths = widths;
  out.error.assign(static_cast<size_t>(config.n_layers * config.n_experts * 3) * widths.size(), std::numeric_limits<float>::quiet_NaN());
  for (const MatrixSpec& spec : all_matrices(config)) {
    if (spec.expert < 0 || spec.block >= config.n_layers || !spec.is_quantizable) continue;
    const int matrix = spec.kind == MatrixKind::kExpertW1 ? 0 : spec.kind == MatrixKind::kExpertW3 ? 1 : 2;
    const auto at = static_cast<size_t>((spec.block * config.n_experts + spec.expert) * 3 + matrix) * widths.size();
    for (size_t w = 0; w < widths.size(); ++w) {
      ASSIGN_OR_RETURN(const auto found, library.errors_of(spec, widths[w]));
      if (found) out.error[at + w] = static_cast<float>(*found);
    }
  }
  return out;
}

}  // namespace

Result<WidthLibrary> open_library(const MakePackOptions& options, const Dataset& data) {
  RETURN_IF_ERROR(check_independent(options.quantize));
  std::map<std::string, std::string> key;
  Json all = options_json(options.quantize, options.rows);
  for (const char* width : {"bits", "dense_bits", "head_bits", "drafter_bits", "keep_native", "rows"}) all.erase(width);
  const auto add = [&](const std::string& name, const Json& value) {
    key[name] = value.is_string() ? value.get<std::string>() : dump_json(value);
  };
  for (const auto& [name, value] : all.items()) {
    if (name != "encoder") add(name, value);
  }
  for (const auto& [name, value] : all.at("encoder").items()) add("encoder." + name, value);
  ASSIGN_OR_RETURN(key["checkpoint"], model_identity(options.checkpoint));
  key["calibration_content_sha256"] = calibration_facts(data).content_sha256;
  key["tool"] = options.tool;
  return WidthLibrary::open(options.library, key, options.quantize.encode.codec.codebook);
}

Result<MakeLibraryReport> make_library(const MakePackOptions& options, const std::vector<int>& widths, Progress& progress,
                                       ThreadPool& pool) {
  RETURN_IF_ERROR(check_options(options.quantize));
  ASSIGN_OR_RETURN(Dataset data, load_dataset(options.data));
  LoadOptions load;
  load.engram_dir = options.engram_dir;
  ASSIGN_OR_RETURN(const WeightLoader loader, WeightLoader::open(options.checkpoint, load));
  RETURN_IF_ERROR(check_widths(options.quantize, loader.config()));
  RETURN_IF_ERROR(
      check_dataset_fits(data, loader.config().vocab, loader.config().max_positions, options.data.filename().string()));
  data.rows = spread_rows(data.rows, options.rows);
  ASSIGN_OR_RETURN(WidthLibrary library, open_library(options, data));
  QuantizeOptions quantize = options.quantize;
  quantize.library = &library;
  ASSIGN_OR_RETURN(const QuantizeReport report, build_library(loader, data.rows, quantize, widths, progress, pool));
  ASSIGN_OR_RETURN(MatrixErrors errors, errors_of(library, loader.config(), widths));
  errors.metadata["calibration_content_sha256"] = calibration_facts(data).content_sha256;
  errors.metadata["seed"] = std::to_string(options.quantize.encode.codec.seed);
  RETURN_IF_ERROR(write_matrix_errors(library.dir() / kErrorsFile, errors, loader.config()));
  MakeLibraryReport out;
  out.matrices = static_cast<int64_t>(report.matrices.size());
  for (const fs::directory_entry& file : fs::directory_iterator(library.dir())) out.bytes += file.is_regular_file() ? file.file_size() : 0;
  return out;
}

}  // namespace espalier
