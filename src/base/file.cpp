#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace espalier {
namespace {

Status write_error(const std::filesystem::path& path, size_t wanted, int error) {
  const std::string text = "cannot write " + std::to_string(wanted) + " bytes to '" + path.string() +
                           "': " + std::strerror(error);
  return error == ENOSPC || error == EDQUOT || error == EFBIG
             ? resource_exhausted(text + "; free disk space and run again")
             : unavailable(text);
}

void sync_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block here
  if (fd < 0) {
    const int error = errno;
    const std::string text = "cannot open '" + path.string() + "': " + std::strerror(error);
    return error == EMFILE || error == ENFILE || error == ENOMEM ? resource_exhausted(text + "; free some or raise the limit") : not_found(text);
  }
  struct stat st {};
  if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    ::close(fd);
    return not_found("'" + path.string() + "' is not a regular file");
  }
  MappedFile file;
  file.path_ = path;
  file.size_ = static_cast<size_t>(st.st_size);
  if (file.size_ > 0) {
    void* p = ::mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
      const int error = errno;
      ::close(fd);
      const std::string text = "cannot map '" + path.string() + "': " + std::strerror(error);
      return error == ENOMEM ? resource_exhausted(text + "; free some or raise the limit") : data_loss(text);
    }
    file.data_ = static_cast<const uint8_t*>(p);
  }
  ::close(fd);
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

Result<std::string> read_text_file(const std::filesystem::path& path, uint64_t limit_bytes) {
  std::error_code ec;
  if (!std::filesystem::is_regular_file(path, ec)) {
    return not_found("'" + path.string() + "' is missing or not a regular file");
  }
  std::FILE* f = std::fopen(path.c_str(), "rb");
  if (f == nullptr) return not_found("cannot open '" + path.string() + "': " + std::strerror(errno));
  std::string out;
  char buffer[65536];
  size_t n = 0;
  bool too_large = false;
  while ((n = std::fread(buffer, 1, sizeof buffer, f)) > 0) {
    out.append(buffer, n);
    if (out.size() > limit_bytes) {
      too_large = true;
      break;
    }
  }
  const bool failed = std::ferror(f) != 0;
  std::fclose(f);
  if (too_large) {
    return data_loss("'" + path.string() + "' is larger than the limit of " + std::to_string(limit_bytes) + " bytes");
  }
  if (failed) return data_loss("cannot read '" + path.string() + "'");
  return out;
}

Status check_output_file(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code ec;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (!path.has_filename()) return failed_precondition("output '" + path.string() + "': expected the name of a file");
  if (!fs::is_directory(folder, ec)) {
    return failed_precondition("output '" + path.string() + "': the folder '" + folder.string() + "' does not exist; make it first");
  }
  if (::access(folder.c_str(), W_OK) != 0) {
    return failed_precondition("output '" + path.string() + "': the folder '" + folder.string() + "' cannot be written to: " +
                               std::strerror(errno));
  }
  const fs::file_status status = fs::symlink_status(path, ec);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    const char* kind = fs::is_directory(status) ? "a folder" : fs::is_symlink(status) ? "a symbolic link" : "not a regular file";
    return failed_precondition("output '" + path.string() + "' is " + kind + "; name a new or a regular file");
  }
  return ok_status();
}

Result<AtomicFile> AtomicFile::create(const std::filesystem::path& path) {
  RETURN_IF_ERROR(check_output_file(path));
  AtomicFile f;
  f.path_ = path;
  f.partial_ = path;
  f.partial_ += ".partial-" + std::to_string(::getpid());
  f.file_ = std::fopen(f.partial_.c_str(), "wb");
  if (f.file_ == nullptr) {
    const int error = errno;
    const std::string text = "cannot create '" + f.partial_.string() + "': " + std::strerror(error);
    f.partial_.clear();
    return error == ENOSPC || error == EDQUOT ? resource_exhausted(text) : failed_precondition(text);
  }
  return f;
}

AtomicFile::~AtomicFile() { discard(); }

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : file_(std::exchange(other.file_, nullptr)),
      path_(std::move(other.path_)),
      partial_(std::exchange(other.partial_, {})) {}

AtomicFile& AtomicFile::operator=(AtomicFile&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(path_, other.path_);
  std::swap(partial_, other.partial_);
  return *this;
}

Status AtomicFile::write(std::span<const uint8_t> bytes) {
  CHECK(file_ != nullptr) << "write after commit";
  if (!bytes.empty() && std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size()) {
    return write_error(path_, bytes.size(), errno);
  }
  return ok_status();
}

Status AtomicFile::write(std::string_view text) {
  return write(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

Status AtomicFile::commit() {
  CHECK(file_ != nullptr) << "commit twice";
  if (std::fflush(file_) != 0 || ::fsync(::fileno(file_)) != 0) {
    const int error = errno;
    discard();
    return write_error(path_, 0, error);
  }
  const bool close_failed = std::fclose(file_) != 0;
  file_ = nullptr;
  if (close_failed || std::rename(partial_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    discard();
    return write_error(path_, 0, error);
  }
  partial_.clear();
  sync_folder(path_.parent_path());
  return ok_status();
}

void AtomicFile::discard() {
  if (file_ != nullptr) std::fclose(file_);
  file_ = nullptr;
  if (!partial_.empty()) ::unlink(partial_.c_str());
  partial_.clear();
}

Status write_text_file(const std::filesystem::path& path, std::string_view text) {
  ASSIGN_OR_RETURN(AtomicFile f, AtomicFile::create(path));
  RETURN_IF_ERROR(f.write(text));
  return f.commit();
}

Result<AtomicDirectory> AtomicDirectory::create(const std::filesystem::path& path, bool reuse_partial) {
  std::error_code ec;
  AtomicDirectory d;
  d.path_ = path.lexically_normal();
  if (!d.path_.has_filename()) d.path_ = d.path_.parent_path();  // "out/" names the same folder as "out"
  if (d.path_.empty()) return invalid_argument("the output folder's name is empty");
  if (std::filesystem::exists(std::filesystem::symlink_status(d.path_, ec))) {
    return failed_precondition("output '" + d.path_.string() + "' exists already; choose another name or remove it");
  }
  d.partial_ = d.path_;
  d.partial_ += ".partial";
  const std::filesystem::path marker = d.partial_ / kMarker;
  const bool is_left_over = std::filesystem::exists(std::filesystem::symlink_status(d.partial_, ec));
  if (is_left_over && !std::filesystem::is_regular_file(std::filesystem::symlink_status(marker, ec))) {
    return failed_precondition("'" + d.partial_.string() + "' is in the way and was not left by an earlier run; move it away");
  }
  for (std::filesystem::path parent = d.path_.parent_path(); !parent.empty() && !std::filesystem::exists(parent, ec);
       parent = parent.parent_path()) {
    d.made_parents_.push_back(parent);
  }
  std::filesystem::create_directories(d.partial_, ec);
  if (ec) return failed_precondition("cannot create '" + d.partial_.string() + "': " + ec.message());
  d.lock_ = ::open(marker.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (d.lock_ < 0) return failed_precondition("cannot create '" + marker.string() + "': " + std::strerror(errno));
  if (::flock(d.lock_, LOCK_EX | LOCK_NB) != 0) {
    return failed_precondition("another run is writing '" + d.path_.string() + "'; wait for it or choose another name");
  }
  if (is_left_over && !reuse_partial) {
    for (const auto& item : std::filesystem::directory_iterator(d.partial_, ec)) {
      if (item.path() != marker) std::filesystem::remove_all(item.path(), ec);
    }
  }
  return d;
}

AtomicDirectory::~AtomicDirectory() {
  if (lock_ >= 0) ::close(lock_);
}

AtomicDirectory::AtomicDirectory(AtomicDirectory&& other) noexcept
    : path_(std::move(other.path_)),
      partial_(std::move(other.partial_)),
      made_parents_(std::move(other.made_parents_)),
      lock_(std::exchange(other.lock_, -1)) {}

AtomicDirectory& AtomicDirectory::operator=(AtomicDirectory&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(partial_, other.partial_);
  std::swap(made_parents_, other.made_parents_);
  std::swap(lock_, other.lock_);
  return *this;
}

Status AtomicDirectory::commit() {
  ::unlink((partial_ / kMarker).c_str());
  if (std::rename(partial_.c_str(), path_.c_str()) != 0) {
    return failed_precondition("cannot rename '" + partial_.string() + "' to '" + path_.string() +
                               "': " + std::strerror(errno));
  }
  sync_folder(path_.parent_path());
  return ok_status();
}

void AtomicDirectory::discard() {
  std::error_code ec;
  std::filesystem::remove_all(partial_, ec);
  for (const std::filesystem::path& parent : made_parents_) {  // innermost first; stops at the first that others use by now
    if (!std::filesystem::remove(parent, ec)) break;
  }
}

}  // namespace espalier
