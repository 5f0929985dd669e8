#include "stages/quantize/work_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "format/json.h"
#include "stages/quantize/matrix_record.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr char kLock[] = "lock";
constexpr char kRecipe[] = "recipe.json";
constexpr char kSchema[] = "espalier-work-1";

Json coverage_json(const BlockCoverage& c) {
  return {{"prefix", c.prefix}, {"tokens", c.tokens}, {"expert_tokens", c.expert_tokens}, {"without_tokens", c.without_tokens}};
}

BlockCoverage coverage_of(const Json& j) {  // throws
  return {j.at("prefix").get<std::string>(), j.at("tokens").get<int64_t>(), j.at("expert_tokens").get<std::vector<int64_t>>(),
          j.at("without_tokens").get<std::vector<int32_t>>()};
}

// Calls `read` with the parsed file; absent, with a warning, when the file is there but not of its form.
template <typename Read>
auto read_if_there(const fs::path& path, const Read& read) -> std::optional<decltype(read(Json()))> {
  std::error_code ec;
  if (!fs::exists(path, ec)) return std::nullopt;
  const auto json = read_json_file(path);
  try {
    if (json.ok()) return read(*json);
  } catch (const Json::exception&) {
  }
  log(LogLevel::kWarning, "'" + path.string() + "' is damaged; what it stands for is made again");
  return std::nullopt;
}

Status check_recipe(const fs::path& path, const WorkFolder::Recipe& recipe, const fs::path& dir) {
  ASSIGN_OR_RETURN(const Json found, read_json_file(path));
  std::string differences;
  const auto differs = [&](const std::string& name, const std::string& then, const std::string& now) {
    differences += (differences.empty() ? "" : "; ") + name + ": expected " + then + ", found " + now;
  };
  const Json old = found.is_object() && found.contains("recipe") ? found["recipe"] : Json::object();
  for (const auto& [name, value] : recipe) {
    const auto it = old.find(name);
    const std::string then = it != old.end() && it->is_string() ? it->get<std::string>() : "nothing";
    if (then != value) differs(name, then, value);
  }
  for (const auto& [name, value] : old.items()) {
    if (recipe.count(name) == 0) differs(name, value.is_string() ? value.get<std::string>() : "something", "nothing");
  }
  if (differences.empty()) return ok_status();
  return failed_precondition("cannot resume from '" + dir.string() + "', the interrupted run differs: " + differences +
                             "; give the same inputs and options, or leave out --resume to begin again");
}

Status make_folder(const fs::path& path) {
  std::error_code ec;
  fs::create_directories(path, ec);
  if (ec) return failed_precondition("cannot create '" + path.string() + "': " + ec.message());
  return ok_status();
}

}  // namespace

Result<WorkFolder> WorkFolder::open(const fs::path& dir, const fs::path& scratch, const Recipe& recipe, bool resume) {
  WorkFolder out;
  out.dir_ = dir;
  out.scratch_ = scratch.empty() ? dir : scratch;
  std::error_code ec;
  const bool is_left_over = fs::exists(fs::symlink_status(dir, ec));
  if (is_left_over && !fs::is_regular_file(fs::symlink_status(dir / kLock, ec))) {
    return failed_precondition("'" + dir.string() + "' is in the way and was not left by an earlier run; move it away");
  }
  RETURN_IF_ERROR(make_folder(dir));
  out.lock_ = ::open((dir / kLock).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (out.lock_ < 0) return failed_precondition("cannot create '" + (dir / kLock).string() + "': " + std::strerror(errno));
  if (::flock(out.lock_, LOCK_EX | LOCK_NB) != 0) {
    return failed_precondition("another run is working in '" + dir.string() + "'; wait for it or choose another output");
  }
  Json doc = {{"schema", kSchema}, {"recipe", Json::object()}};
  for (const auto& [name, value] : recipe) doc["recipe"][name] = value;
  out.recipe_id_ = sha256_hex(dump_json(doc));
  const bool has_recipe = fs::exists(dir / kRecipe, ec);
  if (resume && has_recipe) {
    RETURN_IF_ERROR(check_recipe(dir / kRecipe, recipe, dir));
  } else {
    for (const auto& item : fs::directory_iterator(dir, ec)) {
      if (item.path().filename() != kLock) fs::remove_all(item.path(), ec);
    }
    if (out.scratch_ != dir) fs::remove_all(out.scratch_, ec);
  }
  RETURN_IF_ERROR(make_folder(dir / "units"));
  RETURN_IF_ERROR(make_folder(out.shards()));
  RETURN_IF_ERROR(make_folder(out.scratch_));
  if (!(resume && has_recipe)) RETURN_IF_ERROR(write_text_file(dir / kRecipe, dump_json(doc, 1) + "\n"));
  // What a killed run was just writing.
  for (const fs::path& folder : {dir, dir / "units", out.shards(), out.scratch_}) {
    for (const auto& item : fs::directory_iterator(folder, ec)) {
      if (item.path().filename().string().find(".partial-") != std::string::npos) fs::remove(item.path(), ec);
    }
  }
  return out;
}

WorkFolder::~WorkFolder() {
  if (lock_ >= 0) ::close(lock_);
}

WorkFolder::WorkFolder(WorkFolder&& other) noexcept
    : dir_(std::move(other.dir_)),
      scratch_(std::move(other.scratch_)),
      recipe_id_(std::move(other.recipe_id_)),
      lock_(std::exchange(other.lock_, -1)) {}

fs::path WorkFolder::numbered(const char* what, int number, const char* tail) const {
  char name[64];
  std::snprintf(name, sizeof name, "%s-%04d%s", what, number, tail);
  return name;
}

fs::path WorkFolder::stream_of(int layer) const { return scratch_ / numbered("stream", layer + 1, ""); }

std::optional<EncodedUnit> WorkFolder::find_unit(const UnitShape& shape) const {
  if (!has_unit(shape.name)) return std::nullopt;
  const fs::path path = dir_ / "units" / shape.name;
  const auto file = MappedFile::open(path);
  Status status = file.status();
  if (file.ok()) {
    auto unit = parse_unit(file->bytes(), shape, recipe_id_, "'" + path.string() + "'");
    if (unit.ok()) return std::move(*unit);
    status = unit.error();
  }
  log(LogLevel::kWarning, status.message() + "; it is encoded again");
  return std::nullopt;
}

Status WorkFolder::keep_unit(const EncodedUnit& unit, const std::string& name) const {
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(dir_ / "units" / name));
  RETURN_IF_ERROR(file.write(unit_bytes(unit, name, recipe_id_)));
  return file.commit();
}

bool WorkFolder::has_unit(const std::string& name) const {
  std::error_code ec;
  return fs::is_regular_file(dir_ / "units" / name, ec);
}

std::optional<BlockCoverage> WorkFolder::find_coverage(const std::string& block) const {
  return read_if_there(dir_ / ("coverage-" + block + ".json"), coverage_of);
}

Status WorkFolder::keep_coverage(const std::string& block, const BlockCoverage& coverage) const {
  return write_text_file(dir_ / ("coverage-" + block + ".json"), dump_json(coverage_json(coverage)) + "\n");
}

std::optional<WorkFolder::DoneLayer> WorkFolder::find_layer(int layer) const {
  return read_if_there(dir_ / numbered("layer", layer, ".json"), [](const Json& j) {
    DoneLayer done;
    if (j.empty()) return done;
    for (const Json& record : j.at("records")) done.records.push_back(record_of(record));
    done.coverage = coverage_of(j.at("coverage"));
    done.stream_sha256 = j.at("stream_sha256").get<std::string>();
    return done;
  });
}

Status WorkFolder::keep_layer(int layer, const std::string& prefix, const DoneLayer& done) const {
  Json doc = {{"coverage", coverage_json(done.coverage)}, {"stream_sha256", done.stream_sha256}, {"records", Json::array()}};
  for (const MatrixRecord& record : done.records) doc["records"].push_back(record_json(record));
  RETURN_IF_ERROR(write_text_file(dir_ / numbered("layer", layer, ".json"), dump_json(doc) + "\n"));
  std::error_code ec;
  std::vector<fs::path> gone = {stream_of(layer - 1)};
  for (const auto& item : fs::directory_iterator(dir_ / "units", ec)) {
    if (item.path().filename().string().rfind(prefix, 0) == 0) gone.push_back(item.path());
  }
  for (const fs::path& path : gone) fs::remove(path, ec);
  return ok_status();
}

void WorkFolder::discard() {
  std::error_code ec;
  if (scratch_ != dir_) fs::remove_all(scratch_, ec);
  fs::remove_all(dir_, ec);
}

}  // namespace espalier
