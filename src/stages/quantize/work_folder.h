// The folder in which an unfinished run keeps what is done, so that a run that was killed goes on at the first matrix without
// a finished output.
//
//   recipe.json           what the bytes depend on, by name; a run with another recipe is refused, naming what differs
//   units/NAME            one encoded unit (encoded_unit.h); removed when its layer is done
//   coverage-layers.3.json  routed tokens of a layer, known once its inputs were captured
//   shards/               finished shards
//   stream-0003           the calibration rows behind layer 3 (stream_file.h)
//   layer-0003.json       layer 3 is done: its records, coverage and the digest of its stream
//
// Every file is written whole, flushed and renamed; what cannot be read back is made again. One run at a time holds the folder.
// Threads: find_unit and keep_unit may be called from several at once, for different units.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "stages/quantize/encoded_unit.h"

namespace espalier {

class WorkFolder {
 public:
  using Recipe = std::map<std::string, std::string>;

  // resume: go on with what is there, or begin when there is nothing; else what is there is removed. scratch: another folder for
  // the streams, which are large; empty: the same. Errors: failed_precondition (recipe differs: every difference by name, with
  // both values; another run holds it; a folder that is not ours), those of the file system.
  static Result<WorkFolder> open(const std::filesystem::path& dir, const std::filesystem::path& scratch, const Recipe& recipe,
                                 bool resume);
  ~WorkFolder();
  WorkFolder(WorkFolder&& other) noexcept;
  WorkFolder& operator=(WorkFolder&&) = delete;

  const std::string& recipe_id() const { return recipe_id_; }
  std::filesystem::path shards() const { return dir_ / "shards"; }
  std::filesystem::path stream_of(int layer) const;
  const std::filesystem::path& scratch() const { return scratch_; }

  // Absent when it is not there or damaged (a warning says so).
  std::optional<EncodedUnit> find_unit(const UnitShape& shape) const;
  Status keep_unit(const EncodedUnit& unit, const std::string& name) const;
  bool has_unit(const std::string& name) const;

  std::optional<BlockCoverage> find_coverage(const std::string& block) const;
  Status keep_coverage(const std::string& block, const BlockCoverage& coverage) const;

  struct DoneLayer {
    std::vector<MatrixRecord> records;
    BlockCoverage coverage;
    std::string stream_sha256;
  };
  std::optional<DoneLayer> find_layer(int layer) const;
  // Afterwards the layer's units and the stream before it are gone. prefix: "layers.3.".
  Status keep_layer(int layer, const std::string& prefix, const DoneLayer& done) const;

  // Removes everything.
  void discard();

 private:
  WorkFolder() = default;
  std::filesystem::path numbered(const char* what, int number, const char* tail) const;

  std::filesystem::path dir_, scratch_;
  std::string recipe_id_;
  int lock_ = -1;
};

}  // namespace espalier
