#include "base/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace espalier {
namespace {

namespace fs = std::filesystem;

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("espalier_file_test_" + std::to_string(::getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  size_t count() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(dir_), fs::directory_iterator()));
  }
  fs::path dir_;
};

TEST_F(FileTest, atomic_file_appears_only_at_commit) {
  auto f = AtomicFile::create(dir_ / "a.txt");
  ASSERT_TRUE(f.ok());
  ASSERT_TRUE(f->write("hello").ok());
  EXPECT_FALSE(fs::exists(dir_ / "a.txt"));
  ASSERT_TRUE(f->commit().ok());
  EXPECT_EQ(read_text_file(dir_ / "a.txt").value(), "hello");
  EXPECT_EQ(count(), 1u);
}

TEST_F(FileTest, a_dropped_atomic_file_leaves_nothing_and_keeps_the_old_content) {
  ASSERT_TRUE(write_text_file(dir_ / "a.txt", "old").ok());
  {
    auto f = AtomicFile::create(dir_ / "a.txt");
    ASSERT_TRUE(f.ok());
    ASSERT_TRUE(f->write("new").ok());
  }
  EXPECT_EQ(read_text_file(dir_ / "a.txt").value(), "old");
  EXPECT_EQ(count(), 1u);
}

TEST_F(FileTest, a_full_device_is_resource_exhausted) {
  if (!fs::exists("/dev/full")) FAIL() << "/dev/full is expected on Linux";
  // The partial file's name is known, so a link to the always-full device can stand in its place.
  const fs::path link = dir_ / ("b.txt.partial-" + std::to_string(::getpid()));
  fs::create_symlink("/dev/full", link);
  auto g = AtomicFile::create(dir_ / "b.txt");
  ASSERT_TRUE(g.ok());
  Status s = g->write(std::string(1 << 20, 'x'));
  if (s.ok()) s = g->commit();
  EXPECT_EQ(s.code(), StatusCode::kResourceExhausted) << s.message();
  EXPECT_NE(s.message().find("b.txt"), std::string::npos);
  EXPECT_FALSE(fs::exists(dir_ / "b.txt"));
}

TEST_F(FileTest, mapped_file_refuses_folders_and_missing_files_by_name) {
  EXPECT_EQ(MappedFile::open(dir_).error().code(), StatusCode::kNotFound);
  const auto r = MappedFile::open(dir_ / "missing");
  ASSERT_FALSE(r.ok());
  EXPECT_NE(r.error().message().find("missing"), std::string::npos);
}

TEST_F(FileTest, an_empty_file_maps_to_no_bytes) {
  std::ofstream(dir_ / "empty").close();
  const auto r = MappedFile::open(dir_ / "empty");
  ASSERT_TRUE(r.ok());
  EXPECT_TRUE(r->bytes().empty());
}

TEST_F(FileTest, reading_past_the_limit_is_refused) {
  ASSERT_TRUE(write_text_file(dir_ / "a", std::string(1000, 'x')).ok());
  EXPECT_EQ(read_text_file(dir_ / "a", 999).error().code(), StatusCode::kDataLoss);
  EXPECT_TRUE(read_text_file(dir_ / "a", 1000).ok());
}

TEST_F(FileTest, atomic_directory_appears_whole_and_refuses_an_existing_name) {
  auto d = AtomicDirectory::create(dir_ / "out");
  ASSERT_TRUE(d.ok());
  ASSERT_TRUE(write_text_file(d->partial_path() / "x", "1").ok());
  EXPECT_FALSE(fs::exists(dir_ / "out"));
  ASSERT_TRUE(d->commit().ok());
  EXPECT_TRUE(fs::exists(dir_ / "out" / "x"));
  const auto again = AtomicDirectory::create(dir_ / "out");
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code(), StatusCode::kFailedPrecondition);
}

TEST_F(FileTest, a_discarded_directory_takes_the_parents_along_that_it_made) {
  fs::create_directories(dir_ / "there");
  {
    auto d = AtomicDirectory::create(dir_ / "there" / "a" / "b" / "out");
    ASSERT_TRUE(d.ok());
    d->discard();
  }
  EXPECT_TRUE(fs::exists(dir_ / "there"));
  EXPECT_FALSE(fs::exists(dir_ / "there" / "a"));
  auto d = AtomicDirectory::create(dir_ / "there" / "a" / "b" / "out");
  ASSERT_TRUE(d.ok());
  ASSERT_TRUE(write_text_file(dir_ / "there" / "a" / "kept", "1").ok());
  d->discard();
  EXPECT_FALSE(fs::exists(dir_ / "there" / "a" / "b"));
  EXPECT_TRUE(fs::exists(dir_ / "there" / "a" / "kept"));
}

TEST_F(FileTest, outputs_never_replace_devices_folders_or_links) {
  fs::create_directories(dir_ / "folder");
  fs::create_symlink(dir_ / "elsewhere", dir_ / "link");
  for (const fs::path& path : {fs::path("/dev/null"), dir_ / "folder", dir_ / "link", dir_ / "missing" / "x", fs::path("")}) {
    const auto r = AtomicFile::create(path);
    ASSERT_FALSE(r.ok()) << path;
    EXPECT_EQ(r.error().code(), StatusCode::kFailedPrecondition);
  }
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(FileTest, a_pipe_is_not_waited_for) {
  ASSERT_EQ(::mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(MappedFile::open(dir_ / "pipe").error().code(), StatusCode::kNotFound);
}

// A left-over as a killed run leaves it: the partial folder with its marker.
void leave_partial(const fs::path& partial) {
  fs::create_directories(partial);
  std::ofstream(partial / AtomicDirectory::kMarker).close();
  std::ofstream(partial / "old") << "1";
}

TEST_F(FileTest, atomic_directory_keeps_a_left_over_only_for_resume) {
  leave_partial(dir_ / "out.partial");
  { ASSERT_TRUE(AtomicDirectory::create(dir_ / "out", true).ok()); }
  EXPECT_TRUE(fs::exists(dir_ / "out.partial" / "old"));
  {
    auto d = AtomicDirectory::create(dir_ / "out", false);
    ASSERT_TRUE(d.ok()) << d.error().message();
    EXPECT_FALSE(fs::exists(dir_ / "out.partial" / "old"));
    ASSERT_TRUE(d->commit().ok());
  }
  EXPECT_FALSE(fs::exists(dir_ / "out" / AtomicDirectory::kMarker));
}

TEST_F(FileTest, atomic_directory_never_removes_a_folder_that_is_not_a_left_over) {
  fs::create_directories(dir_ / "out.partial");
  std::ofstream(dir_ / "out.partial" / "notes.txt") << "precious";
  EXPECT_EQ(AtomicDirectory::create(dir_ / "out").error().code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(fs::exists(dir_ / "out.partial" / "notes.txt"));
}

TEST_F(FileTest, two_runs_cannot_write_the_same_folder) {
  auto first = AtomicDirectory::create(dir_ / "out");
  ASSERT_TRUE(first.ok());
  const auto second = AtomicDirectory::create(dir_ / "out");
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.error().message().find("another run"), std::string::npos);
}

}  // namespace
}  // namespace espalier
