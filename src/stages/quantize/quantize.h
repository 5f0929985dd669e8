// Quantizes a checkpoint layer by layer, streaming the calibration rows through the layers that are already quantized.
//
// For every layer: (a) the rows run through its native weights, fed by the quantized layers before it, and the inputs
// of its matrices are captured; (b) its matrices are encoded; (c) the rows run through it again, quantized, and carry
// on. The state carried between layers is everything a forward pass carries (StreamState and SequenceState: residual
// streams, collapse weights, compressed KV and index keys of source layers, selected entries, candidates, taps, Engram
// history); nothing is rebuilt or reset at a layer's border. Then the head, then the drafter stage by stage on the taps
// of the same run, with real draft calls. Output: one finished shard per block. Source: quality specification 1.3
// - 1.5, EXL3 specification 6.1.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/dataset.h"
#include "model/numerics.h"
#include "model/pack_plan.h"
#include "model/weights.h"
#include "stages/quantize/encode.h"

namespace espalier {

class WidthLibrary;  // width_library.h
class WorkFolder;    // work_folder.h

// Which layers the calibration rows have run through when they reach a layer.
enum class StreamFrom {
  kQuantized,  // the layers as they were just encoded: what a reader of the pack feeds the layer with
  kNative,     // the checkpoint's own: a matrix's bytes do not depend on the widths of others (with w2_input native)
};

struct QuantizeOptions {
  // Widths: 1 to 8, and 1.5, 2.5, 3.5 with mul1.
  double bits = 0;                   // routed experts, and everything that has no width of its own
  std::optional<double> dense_bits;  // attention, shared experts, compressor, indexer, Engram projection
  std::optional<double> head_bits;
  std::optional<double> drafter_bits;  // every matrix of the drafter
  // Widths of single matrices; what it does not say falls back to the numbers above (bits = 0: it must say everything).
  std::optional<PackPlan> plan;
  std::vector<std::string> keep_native;  // projections (names.h) that are not quantized: "attn.wkv"
  EncodeSettings encode;
  Numerics numerics = Numerics::kKvq;
  StreamFrom stream = StreamFrom::kQuantized;
  int64_t draft_stride = 8;  // one draft call per so many positions of a row
  // Matrices that are there are taken, others are encoded and added; the bytes are the same either way. Needs the native stream
  // and w2_input native; the caller opens it with a key that says what the bytes depend on. Not recorded.
  WidthLibrary* library = nullptr;
  // Where the run keeps what is done, to go on after a kill; the calibration rows are there too. Null: nowhere, rows in memory.
  // Not together with a library. The caller opens it with a recipe that says what the bytes depend on. Not recorded.
  const WorkFolder* work = nullptr;
};

// A matrix that keeps its native form, and why.
struct NativeMatrix {
  std::string stem;
  std::string reason;
};

struct QuantizeReport {
  std::vector<MatrixRecord> matrices;  // order of the forward pass
  std::vector<NativeMatrix> native;
  std::vector<BlockCoverage> coverage;  // backbone layers, then drafter stages
  int64_t rows = 0;
  int64_t tokens = 0;
  int64_t longest_row = 0;
  int64_t draft_calls = 0;
  // The shortest calibration row and its logits as the streamed, quantized network computes them: a plain forward pass
  // of the finished pack over probe_ids must give the same bits. Empty when the rows streamed through native layers.
  std::vector<int32_t> probe_ids;
  Tensor probe_logits;  // [n, vocab]
};

// The matrices that the options quantize, in the order of the forward pass; the others with the reason.
std::vector<MatrixSpec> quantized_matrices(const QuantizeOptions& options, const Config& config,
                                           std::vector<NativeMatrix>* native);

// Checks of bits against what the encoder can do. Errors: invalid_argument naming the option.
Status check_options(const QuantizeOptions& options);

// Whether a matrix depends on nothing but its own name and width under these options. Errors: invalid_argument naming the options.
Status check_independent(const QuantizeOptions& options);

// Whether the options fit a network: every quantizable matrix has a width that its codebook knows, a wo_a and an expert are
// native as a whole or not at all, keep_native names projections that exist. Errors: invalid_argument, failed_precondition naming the matrix.
Status check_widths(const QuantizeOptions& options, const Config& config);

// Width in half bits of a matrix under the options; kNativeWidth when it keeps its native form.
int width_of(const QuantizeOptions& options, const MatrixSpec& spec, int n_layers);

// loader: the native checkpoint. rows: calibration sequences, fitting the model's vocabulary and context. Shards are
// written into shard_dir, which exists. Errors: failed_precondition when the checkpoint holds EXL3 matrices already;
// data_loss for non-finite weights or activations; cancelled.
Result<QuantizeReport> quantize(const WeightLoader& loader, const std::vector<DatasetRow>& rows,
                                const QuantizeOptions& options, const std::filesystem::path& shard_dir,
                                Progress& progress, ThreadPool& pool);

// Fills options.library: every routed expert of the backbone at each of `widths` (half bits), everything else at the width that
// the options give. Rows stream through once, whatever is missing; nothing else is written. Errors: as quantize.
Result<QuantizeReport> build_library(const WeightLoader& loader, const std::vector<DatasetRow>& rows,
                                     const QuantizeOptions& options, const std::vector<int>& widths, Progress& progress,
                                     ThreadPool& pool);

}  // namespace espalier
