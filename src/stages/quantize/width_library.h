// Encoded matrices by name and width, kept in a folder between runs: every plan over the same native stream is then a lookup.
//
// A matrix's bytes depend on the checkpoint, the calibration rows, the options and its own name and width when the rows stream
// through native layers and w2 sees the native w1 and w3. What they depend on besides name and width is the library's key; a
// library with another key is refused, naming what differs. One file per block and width, written whole; a run that is killed
// goes on with what is there. Source: quality.md 9.3; docs/formats/library.md.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "codec/exl3_tensor.h"
#include "model/names.h"
#include "stages/quantize/encode.h"

namespace espalier {

class WidthLibrary {
 public:
  struct Entry {
    MatrixRecord record;
    codec::Exl3Tensor tensor;
  };

  // Makes the folder, or opens it when it is there. key: flat names and values. Errors: failed_precondition naming the first
  // key that differs, with both values; data_loss for a damaged library.json; those of the file system.
  static Result<WidthLibrary> open(const std::filesystem::path& dir, const std::map<std::string, std::string>& key,
                                   codec::Codebook codebook);

  // The entries of `specs` at `k2` (one each) that are there, by stem. Bytes are checked against the record's digest.
  // Errors: data_loss naming file and tensor.
  Result<std::map<std::string, Entry>> find(const std::vector<MatrixSpec>& specs, const std::vector<int>& k2) const;
  // Whether all of them are there, from headers alone.
  Result<bool> has_all(const std::vector<MatrixSpec>& specs, const std::vector<int>& k2) const;

  // True error of one matrix at a width; absent when it is not there.
  Result<std::optional<double>> errors_of(const MatrixSpec& spec, int k2) const;

  // Adds matrices to a block's file of one width; those that are there already are kept. block: as MatrixSpec::block.
  Status add(int block, int k2, const std::vector<Entry>& entries);

  // Routed tokens of a block, as counted when its experts were encoded.
  Result<std::optional<BlockCoverage>> coverage(int block) const;
  Status add_coverage(int block, const BlockCoverage& coverage);

  const std::filesystem::path& dir() const { return dir_; }

 private:
  WidthLibrary(std::filesystem::path dir, codec::Codebook codebook) : dir_(std::move(dir)), codebook_(codebook) {}
  std::filesystem::path file_of(int block, int k2) const;

  std::filesystem::path dir_;
  codec::Codebook codebook_;
  mutable std::map<std::string, std::map<std::string, double>> errors_;  // by file, as read last
};

}  // namespace espalier
