// Holds a model folder against everything that says what it should be: its manifest, the network that its config calls for,
// the format of its matrices, the digests of its tensors, its side files, its tokenizer. Reads every byte.
//
// Nothing is repaired or assumed: each difference is one line that names file and tensor. Source: packs.md 7; quality.md 7;
// docs/formats/pack.md, "Verifying".
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/folder.h"

namespace espalier {

struct VerifyReport {
  Layout layout = Layout::kOfficial;
  int64_t n_tensors = 0;
  int64_t n_matrices = 0;  // EXL3 matrices whose format was checked
  int64_t n_digests = 0;   // of those, compared with the digest of their encoding
  std::vector<std::string> problems;
  std::vector<std::string> notes;  // what could not be checked because nothing says what it should be
};

// engram_dir: another folder with the Engram shards; empty: none. Errors: not_found when `dir` is no folder; cancelled.
Result<VerifyReport> verify_folder(const std::filesystem::path& dir, const std::filesystem::path& engram_dir,
                                   Progress& progress, ThreadPool& pool);

// Index of the first element that is NaN or infinite (any float type, F8_E8M0 included), or -1. Whole numbers are always fine.
int64_t first_not_finite(const ConstView& view);

// matrices.jsonl: name and digest of every encoded matrix. Errors: data_loss naming `what` and the line.
struct MatrixDigest {
  std::string name;
  int k2 = 0;
  std::string sha256;  // over trellis, suh and svh bytes
};
Result<std::vector<MatrixDigest>> parse_matrix_digests(std::string_view text, std::string_view what);

}  // namespace espalier
