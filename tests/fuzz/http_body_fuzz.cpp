// module: serve
// Any bytes as the body of a chat or text completion end in a call or in a 4xx error with a readable envelope; a call that was
// accepted renders to a prompt or to an error. The first byte picks the route.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>
#include <variant>

#include "base/check.h"
#include "format/json.h"
#include "serve/request.h"

namespace {

// The golden model's tokenizer: small, byte-level, with the markers of the chat encoding.
const espalier::Tokenizer& tokenizer() {
  static const espalier::Tokenizer* made = [] {
    auto opened = espalier::Tokenizer::open(ESPALIER_SOURCE_DIR "/tests/golden/model/tiny-a/tokenizer.json");
    CHECK(opened.ok()) << opened.status().message();
    return new espalier::Tokenizer(std::move(*opened));
  }();
  return *made;
}

void check_error(const espalier::ApiError& error) {
  CHECK(error.status >= 400 && error.status < 500) << error.status << ": " << error.message;
  CHECK(!error.message.empty());
  const auto envelope = espalier::parse_json(espalier::error_body(error), "envelope");
  CHECK(envelope.ok()) << envelope.error().message();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const espalier::CallRules rules{.served_name = "m"};
  const bool is_chat = data[0] % 2 == 0;
  auto outcome = is_chat ? espalier::parse_chat_call(body, rules) : espalier::parse_completion_call(body, rules);
  if (const auto* error = std::get_if<espalier::ApiError>(&outcome)) {
    check_error(*error);
    return 0;
  }
  espalier::Call& call = std::get<espalier::Call>(outcome);
  CHECK(call.is_chat() == is_chat);
  const auto error = espalier::build_prompt(call, rules, tokenizer(), 4096);
  if (error) {
    CHECK(error->status >= 400) << error->status;
  } else {
    CHECK(!call.generation.prompt_ids.empty() && call.generation.prompt_ids.size() < 4096);
    CHECK(tokenizer().check_ids(call.generation.prompt_ids).ok());
  }
  return 0;
}
