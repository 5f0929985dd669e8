#include "text/python_json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace espalier {
namespace {

TEST(PythonJson, separators_order_and_escapes_are_those_of_json_dumps) {
  const auto value =
      parse_json(R"({"b":[1,2.0,null,true],"a":{"x":"é/\u007f\"\\\n\r\t\b\f\u0001\u001f"},"e":[],"o":{}})", "t");
  EXPECT_EQ(python_json(*value),
            "{\"b\": [1, 2.0, null, true], \"a\": {\"x\": \"é/\x7f\\\"\\\\\\n\\r\\t\\b\\f\\u0001\\u001f\"}, \"e\": [], "
            "\"o\": {}}");
}

TEST(PythonJson, floats_are_written_as_repr_does) {
  // Expected strings: repr() of CPython 3.11.
  const std::pair<double, const char*> cases[] = {{1.0, "1.0"},
                                                  {0.1, "0.1"},
                                                  {1e5, "100000.0"},
                                                  {1e15, "1000000000000000.0"},
                                                  {1e16, "1e+16"},
                                                  {1.5e16, "1.5e+16"},
                                                  {1e22, "1e+22"},
                                                  {0.0001, "0.0001"},
                                                  {0.00001, "1e-05"},
                                                  {1.25e-7, "1.25e-07"},
                                                  {-0.0, "-0.0"},
                                                  {123456.789, "123456.789"},
                                                  {1e100, "1e+100"},
                                                  {5e-324, "5e-324"},
                                                  {-2.5, "-2.5"},
                                                  {1.7976931348623157e308, "1.7976931348623157e+308"},
                                                  {9007199254740993.0, "9007199254740992.0"},
                                                  {0.00012345, "0.00012345"}};
  for (const auto& [value, text] : cases) EXPECT_EQ(python_float(value), text);
}

TEST(PythonJson, integers_keep_their_digits) {
  EXPECT_EQ(python_json(*parse_json("[0,-5,9223372036854775807,18446744073709551615]", "t")),
            "[0, -5, 9223372036854775807, 18446744073709551615]");
}

}  // namespace
}  // namespace espalier
