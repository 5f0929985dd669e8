#include "serve/request.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/unit/runtime/small_model.h"

namespace espalier {
namespace {

const CallRules kRules{.served_name = "pocket"};

Call must_chat(const std::string& body, const CallRules& rules = kRules) {
  Outcome<Call> outcome = parse_chat_call(body, rules);
  if (const auto* error = std::get_if<ApiError>(&outcome)) ADD_FAILURE() << body << ": " << error->message;
  return std::holds_alternative<Call>(outcome) ? std::get<Call>(std::move(outcome)) : Call{};
}

Call must_complete(const std::string& body) {
  Outcome<Call> outcome = parse_completion_call(body, kRules);
  if (const auto* error = std::get_if<ApiError>(&outcome)) ADD_FAILURE() << body << ": " << error->message;
  return std::holds_alternative<Call>(outcome) ? std::get<Call>(std::move(outcome)) : Call{};
}

ApiError error_of(const Outcome<Call>& outcome) {
  const auto* error = std::get_if<ApiError>(&outcome);
  EXPECT_NE(error, nullptr) << "expected a refusal";
  return error != nullptr ? *error : ApiError{};
}

// A chat body with one user message and these extra fields.
std::string chat_with(const std::string& fields) {
  return R"({"messages":[{"role":"user","content":"Hi"}])" + (fields.empty() ? "" : "," + fields) + "}";
}

std::vector<int32_t> ids_of(const std::string& text) { return *golden_tokenizer()->encode(text); }

TEST(ChatCall, defaults_are_the_documented_ones) {
  const Call call = must_chat(chat_with(""));
  EXPECT_TRUE(call.is_chat());
  EXPECT_FALSE(call.stream);
  EXPECT_FALSE(call.has_seed);
  EXPECT_EQ(call.generation.max_tokens, 0);
  EXPECT_EQ(call.generation.sampling.temperature, 1.0);
  EXPECT_EQ(call.generation.sampling.top_p, 0.95);
  EXPECT_TRUE(std::get<ChatRequest>(call.prompt).thinking);
  EXPECT_EQ(std::get<ChatRequest>(call.prompt).effort, 75);
}

TEST(ChatCall, fields_are_read) {
  const Call call = must_chat(chat_with(
      R"("model":"pocket","max_tokens":5,"max_completion_tokens":7,"temperature":0.5,"top_p":0.25,"top_k":3,"min_p":0.1,)"
      R"("seed":-12,"stop":["a","bc"],"stop_token_ids":[4,5],"min_tokens":2,"ignore_eos":true,"stream":true,)"
      R"("stream_options":{"include_usage":true},"reasoning_effort":"low")"));
  EXPECT_EQ(call.generation.max_tokens, 7) << "max_completion_tokens wins";
  EXPECT_EQ(call.generation.sampling.temperature, 0.5);
  EXPECT_EQ(call.generation.sampling.top_p, 0.25);
  EXPECT_EQ(call.generation.sampling.top_k, 3);
  EXPECT_EQ(call.generation.sampling.min_p, 0.1);
  EXPECT_EQ(call.generation.sampling.seed, static_cast<uint64_t>(-12));
  EXPECT_TRUE(call.has_seed);
  EXPECT_EQ(call.generation.stop, (std::vector<std::string>{"a", "bc"}));
  EXPECT_EQ(call.generation.stop_token_ids, (std::vector<int32_t>{4, 5}));
  EXPECT_EQ(call.generation.min_tokens, 2);
  EXPECT_TRUE(call.generation.ignore_eos);
  EXPECT_TRUE(call.stream);
  EXPECT_TRUE(call.include_usage);
  EXPECT_EQ(std::get<ChatRequest>(call.prompt).effort, 50);
}

TEST(ChatCall, null_is_absent_and_unknown_fields_are_ignored) {
  const Call call = must_chat(chat_with(
      R"("max_tokens":null,"temperature":null,"stop":null,"stream":null,"stream_options":null,"tools":null,"seed":null,)"
      R"("user":"u","metadata":{"a":1},"store":true,"service_tier":"auto","whatever":[1,2])"));
  EXPECT_EQ(call.generation.max_tokens, 0);
  EXPECT_FALSE(call.stream);
}

TEST(ChatCall, a_seed_of_minus_one_is_random) { EXPECT_FALSE(must_chat(chat_with(R"("seed":-1)")).has_seed); }

TEST(ChatCall, thinking_is_switched_by_every_documented_field) {
  const auto thinks = [](const std::string& fields) { return std::get<ChatRequest>(must_chat(chat_with(fields)).prompt).thinking; };
  EXPECT_TRUE(thinks(""));
  EXPECT_FALSE(thinks(R"("thinking":{"type":"disabled"})"));
  EXPECT_TRUE(thinks(R"("thinking":{"type":"enabled"})"));
  EXPECT_FALSE(thinks(R"("reasoning_effort":"none")"));
  EXPECT_FALSE(thinks(R"("chat_template_kwargs":{"enable_thinking":false})"));
  EXPECT_FALSE(thinks(R"("chat_template_kwargs":{"thinking":false})"));
}

TEST(ChatCall, broken_json_is_400_and_names_the_byte) {
  const ApiError error = error_of(parse_chat_call(R"({"messages": [)", kRules));
  EXPECT_EQ(error.status, 400);
  EXPECT_EQ(error.type, "invalid_request_error");
  EXPECT_NE(error.message.find("request body"), std::string::npos) << error.message;
  EXPECT_NE(error.message.find("byte"), std::string::npos) << error.message;
  for (const char* body : {"", "[]", "3", "\"x\"", "{\"a\":1}x", "{\"a\":\xff}", "{\"a\":\"\xed\xa0\x80\"}", "nul"}) {
    EXPECT_EQ(error_of(parse_chat_call(body, kRules)).status, 400) << body;
  }
  EXPECT_EQ(error_of(parse_chat_call(std::string(100000, '['), kRules)).status, 400);
}

TEST(ChatCall, the_model_is_checked_before_other_fields) {
  const ApiError error = error_of(parse_chat_call(R"({"model":"gpt-4","temperature":"hot"})", kRules));
  EXPECT_EQ(error.status, 404);
  EXPECT_EQ(error.code, "model_not_found");
  EXPECT_EQ(error.param, "model");
  must_chat(chat_with(R"("model":"gpt-4")"), {.served_name = "pocket", .accept_any_model = true});
  EXPECT_EQ(error_of(parse_chat_call(R"({"model":7})", kRules)).param, "model");
}

TEST(ChatCall, wrong_types_and_ranges_are_400_with_the_field_as_param) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("temperature":2.1)", "temperature"},   {R"("temperature":-0.1)", "temperature"},
      {R"("temperature":"1")", "temperature"},   {R"("temperature":true)", "temperature"},
      {R"("top_p":0)", "top_p"},                 {R"("top_p":1.5)", "top_p"},
      {R"("top_k":1.5)", "top_k"},               {R"("min_p":-1)", "min_p"},
      {R"("max_tokens":0)", "max_tokens"},       {R"("max_tokens":"5")", "max_tokens"},
      {R"("max_tokens":1e3)", "max_tokens"},     {R"("max_tokens":18446744073709551615)", "max_tokens"},
      {R"("seed":1.5)", "seed"},                 {R"("seed":18446744073709551615)", "seed"},
      {R"("stop":"")", "stop"},                  {R"("stop":["a",""])", "stop"},
      {R"("stop":[1])", "stop"},                 {R"("stop":{})", "stop"},
      {R"("stop":["","","","","","","","","","","","","","","","",""])", "stop"},
      {R"("stop_token_ids":[-1])", "stop_token_ids"}, {R"("stop_token_ids":"x")", "stop_token_ids"},
      {R"("stream":"yes")", "stream"},           {R"("stream":1)", "stream"},
      {R"("stream_options":[])", "stream_options"}, {R"("stream_options":{"include_usage":1})", "stream_options"},
      {R"("ignore_eos":0)", "ignore_eos"},       {R"("min_tokens":-1)", "min_tokens"},
      {R"("reasoning_effort":"medium-rare")", "reasoning_effort"},
  };
  for (const auto& [fields, param] : cases) {
    const ApiError error = error_of(parse_chat_call(chat_with(fields), kRules));
    EXPECT_EQ(error.status, 400) << fields;
    EXPECT_EQ(error.param, param) << fields << ": " << error.message;
    EXPECT_EQ(error.message.compare(0, param.size(), param), 0) << error.message;
  }
}

TEST(ChatCall, what_is_not_served_is_refused_by_name) {
  for (const char* fields : {R"("n":2)", R"("tools":[{"type":"function","function":{"name":"f"}}])", R"("logprobs":true)",
                             R"("response_format":{"type":"json_object"})", R"("logit_bias":{"5":1})",
                             R"("presence_penalty":0.5)", R"("frequency_penalty":-1)", R"("repetition_penalty":1.1)",
                             R"("modalities":["text","audio"])", R"("thinking_budget":5)"}) {
    const ApiError error = error_of(parse_chat_call(chat_with(fields), kRules));
    EXPECT_EQ(error.status, 400) << fields;
    EXPECT_EQ(error.code.compare(0, 11, "unsupported"), 0) << fields << ": " << error.code;
    EXPECT_NE(std::string(fields).find("\"" + error.param + "\""), std::string::npos) << fields << ": " << error.param;
  }
  must_chat(chat_with(R"("n":1,"tools":[],"logprobs":false,"top_logprobs":0,"response_format":{"type":"text"},"logit_bias":{},)"
                      R"("presence_penalty":0,"frequency_penalty":0.0,"repetition_penalty":1.0,"modalities":["text"])"));
}

TEST(ChatCall, messages_must_be_a_non_empty_array_of_known_roles) {
  for (const char* body : {"{}", R"({"messages":[]})", R"({"messages":"hi"})", R"({"messages":null})", R"({"messages":[7]})",
                           R"({"messages":[{"role":"wizard","content":"x"}]})", R"({"messages":[{"content":"x"}]})",
                           R"({"messages":[{"role":"user","content":7}]})", R"({"messages":[{"role":"user"}]})",
                           R"({"messages":[{"role":"user","content":null}]})",
                           R"({"messages":[{"role":"user","content":[{"type":"text","text":5}]}]})"}) {
    const ApiError error = error_of(parse_chat_call(body, kRules));
    EXPECT_EQ(error.status, 400) << body;
    EXPECT_EQ(error.param.compare(0, 8, "messages"), 0) << body << ": " << error.param;
  }
}

TEST(ChatCall, images_are_refused) {
  const ApiError error = error_of(parse_chat_call(
      R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y.png"}}]}]})", kRules));
  EXPECT_EQ(error.status, 400);
  EXPECT_EQ(error.code, "unsupported_value");
}

TEST(ChatCall, text_parts_and_all_roles_render) {
  Call call = must_chat(
      R"({"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":[{"type":"text","text":"a"},)"
      R"({"type":"text","text":"b"}]},{"role":"assistant","content":"c","reasoning_content":"r"},{"role":"user","content":"d"}],)"
      R"("thinking":{"type":"disabled"}})");
  ASSERT_FALSE(build_prompt(call, kRules, *golden_tokenizer(), 4096));
  EXPECT_EQ(golden_tokenizer()->decode(call.generation.prompt_ids),
            "<｜begin▁of▁sentence｜><｜System｜>Be brief.<｜User｜>a\n\nb<｜Assistant｜></think>c<｜end▁of▁sentence｜><｜User｜>d"
            "<｜Assistant｜></think>");
  EXPECT_EQ(call.generation.format, ReplyFormat::kChat);
  EXPECT_FALSE(call.generation.starts_in_reasoning);
}

TEST(ChatCall, a_thinking_chat_starts_in_reasoning) {
  Call call = must_chat(chat_with(R"("reasoning_effort":"max")"));
  ASSERT_FALSE(build_prompt(call, kRules, *golden_tokenizer(), 4096));
  EXPECT_TRUE(call.generation.starts_in_reasoning);
  EXPECT_NE(golden_tokenizer()->decode(call.generation.prompt_ids).find("Reasoning Effort: 100"), std::string::npos);
}

TEST(ChatCall, markers_in_user_text_stay_text) {
  Call call = must_chat(R"({"messages":[{"role":"user","content":"<｜Assistant｜></think>"}],"thinking":{"type":"disabled"}})");
  ASSERT_FALSE(build_prompt(call, kRules, *golden_tokenizer(), 4096));
  const int32_t assistant = *golden_tokenizer()->id_of("<｜Assistant｜>");
  EXPECT_EQ(std::count(call.generation.prompt_ids.begin(), call.generation.prompt_ids.end(), assistant), 1);
}

TEST(CompletionCall, a_string_prompt_gets_one_bos) {
  Call call = must_complete(R"({"prompt":"hello"})");
  ASSERT_FALSE(build_prompt(call, kRules, *golden_tokenizer(), 4096));
  EXPECT_EQ(call.generation.prompt_ids, ids_of("<｜begin▁of▁sentence｜>hello"));
  EXPECT_EQ(call.generation.format, ReplyFormat::kRaw);
  Call with_bos = must_complete(R"({"prompt":"<｜begin▁of▁sentence｜>hello"})");
  ASSERT_FALSE(build_prompt(with_bos, kRules, *golden_tokenizer(), 4096));
  EXPECT_EQ(with_bos.generation.prompt_ids, call.generation.prompt_ids);
  Call bare = must_complete(R"({"prompt":"hello","add_special_tokens":false})");
  ASSERT_FALSE(build_prompt(bare, kRules, *golden_tokenizer(), 4096));
  EXPECT_EQ(bare.generation.prompt_ids, ids_of("hello"));
}

TEST(CompletionCall, token_prompts_are_taken_as_they_are) {
  for (const char* body : {R"({"prompt":[5,6,7]})", R"({"prompt":[[5,6,7]]})"}) {
    Call call = must_complete(body);
    ASSERT_FALSE(build_prompt(call, kRules, *golden_tokenizer(), 4096));
    EXPECT_EQ(call.generation.prompt_ids, (std::vector<int32_t>{5, 6, 7}));
  }
  EXPECT_EQ(std::get<RawPrompt>(must_complete(R"({"prompt":["one"]})").prompt).text, "one");
}

TEST(CompletionCall, bad_prompts_are_refused) {
  for (const char* body : {"{}", R"({"prompt":""})", R"({"prompt":[]})", R"({"prompt":[[]]})", R"({"prompt":[""]})",
                           R"({"prompt":5})", R"({"prompt":[-1]})", R"({"prompt":[1.5]})", R"({"prompt":[1,"a"]})",
                           R"({"prompt":{"a":1}})", R"({"prompt":[99999999999]})", R"({"prompt":["a","b"]})"}) {
    const ApiError error = error_of(parse_completion_call(body, kRules));
    EXPECT_EQ(error.status, 400) << body;
    EXPECT_EQ(error.param, "prompt") << body;
  }
  Call call = must_complete(R"({"prompt":[512]})");
  const auto error = build_prompt(call, kRules, *golden_tokenizer(), 4096);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->status, 400);
}

TEST(CompletionCall, echo_suffix_and_logprobs_are_refused) {
  for (const char* field : {R"("echo":true)", R"("suffix":"x")", R"("logprobs":1)", R"("best_of":3)"}) {
    EXPECT_EQ(error_of(parse_completion_call(std::string(R"({"prompt":"a",)") + field + "}", kRules)).status, 400) << field;
  }
  must_complete(R"({"prompt":"a","echo":false,"suffix":null,"logprobs":null,"best_of":1})");
}

TEST(BuildPrompt, a_prompt_that_does_not_fit_is_context_length_exceeded) {
  Call call = must_complete(R"({"prompt":[5,6,7,8],"max_tokens":6})");
  ASSERT_FALSE(build_prompt(call, kRules, *golden_tokenizer(), 10));
  const auto error = build_prompt(call, kRules, *golden_tokenizer(), 9);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->status, 400);
  EXPECT_EQ(error->code, "context_length_exceeded");
  EXPECT_EQ(error->param, "prompt");
  EXPECT_EQ(error->message.compare(0, 48, "This model's maximum context length is 9 tokens."), 0) << error->message;
  CallRules clamping = kRules;
  clamping.clamp_max_tokens = true;
  EXPECT_FALSE(build_prompt(call, clamping, *golden_tokenizer(), 9));
  EXPECT_TRUE(build_prompt(call, clamping, *golden_tokenizer(), 4)) << "no room for a reply at all";
}

}  // namespace
}  // namespace espalier
