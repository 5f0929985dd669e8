// module: text
// Any bytes are encoded; decoding gives them back with ill-formed parts replaced, and the stream decoder agrees.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

const espalier::Tokenizer& tokenizer() {
  static const espalier::Tokenizer instance =
      espalier::Tokenizer::open(ESPALIER_SOURCE_DIR "/tests/golden/model/tiny-a").value();
  return instance;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::string valid = espalier::to_valid_utf8(text);
  const auto ids = tokenizer().encode(text);
  CHECK(ids.ok()) << ids.error().message();
  CHECK(tokenizer().decode(*ids) == valid);
  espalier::StreamDecoder decoder(tokenizer());
  std::string joined;
  for (const int32_t id : *ids) joined += decoder.push(id);
  CHECK(joined + decoder.finish() == valid);
  // The first half trusted, the second not: the text stays the same, whatever becomes a marker.
  const espalier::PromptSpan spans[] = {{text.substr(0, size / 2), true}, {text.substr(size / 2), false}};
  const auto parts = tokenizer().encode_spans(spans);
  CHECK(parts.ok());
  CHECK(tokenizer().decode(*parts) ==
        espalier::to_valid_utf8(text.substr(0, size / 2)) + espalier::to_valid_utf8(text.substr(size / 2)));
  return 0;
}
