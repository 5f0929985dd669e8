#include "base/status.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

Result<int> half(int x) {
  if (x % 2 != 0) return invalid_argument("x is odd: " + std::to_string(x));
  return x / 2;
}

Result<int> quarter(int x) {
  ASSIGN_OR_RETURN(const int h, half(x));
  ASSIGN_OR_RETURN(const int q, half(h));
  return q;
}

TEST(Status, is_ok_by_default_and_context_leaves_it_ok) {
  EXPECT_TRUE(Status().with_context("load").ok());
}

TEST(Status, context_is_put_before_the_message) {
  const Status s = data_loss("bad byte").with_context("shard 3").with_context("load");
  EXPECT_EQ(s.message(), "load: shard 3: bad byte");
  EXPECT_EQ(s.code(), StatusCode::kDataLoss);
  EXPECT_EQ(status_code_name(s.code()), "data_loss");
}

TEST(Result, holds_a_value_or_the_first_error_met) {
  EXPECT_EQ(quarter(8).value(), 2);
  EXPECT_EQ(quarter(6).error().message(), "x is odd: 3");
  EXPECT_FALSE(quarter(7).ok());
}

TEST(ResultDeathTest, reading_the_value_of_an_error_stops_the_process_with_its_message) {
  EXPECT_DEATH(half(3).value(), "x is odd: 3");
}

}  // namespace
}  // namespace espalier
