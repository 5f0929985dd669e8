// module: text
// Any bytes given as tokenizer.json make a tokenizer or are refused; a tokenizer that was made encodes and decodes.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto tokenizer =
      espalier::Tokenizer::parse(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  if (!tokenizer.ok()) {
    CHECK(!tokenizer.error().message().empty());
    return 0;
  }
  const auto ids = tokenizer->encode("the hello  123 <think>\n\n 你好 \xF0\x9F\x98\x80", {.add_template = true});
  if (ids.ok()) {  // a hostile split pattern may exceed its matching limits
    CHECK(tokenizer->check_ids(*ids).ok());
    tokenizer->decode(*ids);
  }
  return 0;
}
