#include "format/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace espalier {
namespace {

void expect_refused(const std::string& text, const std::string& part) {
  const auto r = parse_json(text, "config.json");
  ASSERT_FALSE(r.ok()) << text;
  EXPECT_EQ(r.error().code(), StatusCode::kDataLoss);
  EXPECT_NE(r.error().message().find("config.json"), std::string::npos);
  EXPECT_NE(r.error().message().find(part), std::string::npos) << r.error().message();
}

TEST(Json, keeps_key_order_and_large_integers) {
  const auto r = parse_json(R"({"z":18446744073709551615,"a":[-9223372036854775808,{"x":null}]})", "t");
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(dump_json(*r), R"({"z":18446744073709551615,"a":[-9223372036854775808,{"x":null}]})");
  EXPECT_EQ((*r)["z"].get<uint64_t>(), UINT64_MAX);
}

TEST(Json, duplicate_keys_are_refused_at_any_depth) {
  expect_refused(R"({"a":1,"a":2})", "'a' appears twice");
  expect_refused(R"([{"b":{"a":1,"a":2}}])", "'a' appears twice");
  EXPECT_TRUE(parse_json(R"([{"a":1},{"a":2}])", "t").ok());
}

TEST(Json, broken_text_names_the_byte) {
  expect_refused(R"({"a":1,)", "at byte 8");
  expect_refused("", "JSON");
  expect_refused("{} x", "JSON");
  expect_refused("{\"a\":\"\xff\"}", "JSON");
  expect_refused("NaN", "JSON");
  expect_refused("1e999", "JSON");
}

TEST(Json, deep_nesting_is_refused_without_recursion) {
  const std::string deep = std::string(1000000, '[');
  expect_refused(deep, "nested deeper");
}

TEST(Json, dumps_bytes_that_are_not_utf8_as_replacement_characters) {
  EXPECT_EQ(dump_json(Json("a\xff")), "\"a\xEF\xBF\xBD\"");
}

}  // namespace
}  // namespace espalier
