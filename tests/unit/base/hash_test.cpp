#include "base/hash.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace espalier {
namespace {

TEST(Sha256, matches_the_published_vectors) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Sha256, does_not_depend_on_how_the_bytes_are_cut) {
  const std::string text(100000, 'x');
  Sha256 h;
  for (size_t i = 0; i < text.size(); i += 777) h.update(std::string_view(text).substr(i, 777));
  EXPECT_EQ(h.finish_hex(), sha256_hex(text));
}

TEST(Sha256, a_missing_file_is_not_found_and_named) {
  const auto r = sha256_file_hex("/nonexistent/file");
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().code(), StatusCode::kNotFound);
  EXPECT_NE(r.error().message().find("/nonexistent/file"), std::string::npos);
}

TEST(CounterRng, depends_on_seed_name_and_position_only) {
  const CounterRng a(1, "layers.0.w1"), b(1, "layers.0.w1"), c(2, "layers.0.w1"), d(1, "layers.0.w3");
  EXPECT_EQ(a.bits(5), b.bits(5));
  EXPECT_NE(a.bits(5), c.bits(5));
  EXPECT_NE(a.bits(5), d.bits(5));
  EXPECT_NE(a.bits(5), a.bits(6));
}

TEST(CounterRng, uniform_values_fill_the_interval_evenly) {
  const CounterRng r(7, "test");
  int buckets[10] = {};
  for (uint64_t i = 0; i < 100000; ++i) buckets[static_cast<int>(r.uniform(i) * 10)]++;
  for (int b : buckets) EXPECT_NEAR(b, 10000, 5 * 95);  // five standard deviations of a binomial(100000, 0.1)
}

}  // namespace
}  // namespace espalier
