// module: text
// Any bytes given as a chat body render or are refused; the ids of a rendered prompt decode to its text.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace {

const espalier::Tokenizer& tokenizer() {
  static const espalier::Tokenizer instance =
      espalier::Tokenizer::open(ESPALIER_SOURCE_DIR "/tests/golden/model/tiny-a").value();
  return instance;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto chat = espalier::parse_chat(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!chat.ok()) {
    CHECK(!chat.error().message().empty());
    return 0;
  }
  const auto prompt = espalier::render_chat(tokenizer(), *chat);
  if (prompt.ok()) CHECK(tokenizer().decode(prompt->ids) == prompt->text);
  return 0;
}
