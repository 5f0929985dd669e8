#include "serve/response.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "format/json.h"
#include "serve/http_types.h"

namespace espalier {
namespace {

Generation sample() {
  Generation g;
  g.content = "Hi \"you\"\n\xE2\x82\xAC";
  g.token_ids = {4, 5, 6};
  g.n_prompt = 7;
  g.n_reasoning = 1;
  return g;
}

// The JSON documents of a stream's events; checks the framing.
std::vector<Json> events_of(const std::string& text) {
  std::vector<Json> events;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = text.find("\n\n", at);
    EXPECT_NE(end, std::string::npos) << "an event does not end";
    if (end == std::string::npos) break;
    const std::string event = text.substr(at, end - at);
    EXPECT_EQ(event.compare(0, 6, "data: "), 0) << event;
    EXPECT_EQ(event.find('\n'), std::string::npos) << "an event has more than one line";
    at = end + 2;
    events.push_back(event == "data: [DONE]" ? Json("[DONE]") : Json::parse(event.substr(6)));
  }
  return events;
}

const ReplyHead kChat{.id = "chatcmpl-1", .created = 1700000000, .model = "pocket", .seed = 99};

TEST(ReplyBody, chat_has_the_documented_shape) {
  const Json body = Json::parse(reply_body(kChat, sample()));
  EXPECT_EQ(body["id"], "chatcmpl-1");
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["created"], 1700000000);
  EXPECT_EQ(body["model"], "pocket");
  EXPECT_EQ(body["x_seed"], 99);
  const Json& choice = body["choices"].at(0);
  EXPECT_EQ(choice["index"], 0);
  EXPECT_EQ(choice["message"]["role"], "assistant");
  EXPECT_EQ(choice["message"]["content"], sample().content);
  EXPECT_FALSE(choice["message"].contains("reasoning_content")) << "thinking is off";
  EXPECT_FALSE(choice["message"].contains("tool_calls"));
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_TRUE(choice["stop_reason"].is_null());
  const Json& usage = body["usage"];
  EXPECT_EQ(usage["prompt_tokens"], 7);
  EXPECT_EQ(usage["completion_tokens"], 3);
  EXPECT_EQ(usage["total_tokens"], 10);
  EXPECT_EQ(usage["completion_tokens_details"]["reasoning_tokens"], 1);
}

TEST(ReplyBody, thinking_replies_carry_both_names_of_the_reasoning) {
  ReplyHead head = kChat;
  head.thinking = true;
  Generation g = sample();
  g.content = "";
  g.reasoning = "long thought";
  g.finish_reason = FinishReason::kLength;
  const Json message = Json::parse(reply_body(head, g))["choices"][0]["message"];
  EXPECT_EQ(message["reasoning_content"], "long thought");
  EXPECT_EQ(message["reasoning"], "long thought");
  EXPECT_EQ(message["content"], "") << "never null: some clients crash on it";
  EXPECT_EQ(Json::parse(reply_body(head, g))["choices"][0]["finish_reason"], "length");
}

TEST(ReplyBody, completions_hold_text_and_the_stop_reason) {
  ReplyHead head = kChat;
  head.is_chat = false;
  Generation g = sample();
  g.stop_string = "END";
  const Json body = Json::parse(reply_body(head, g));
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["choices"][0]["text"], g.content);
  EXPECT_EQ(body["choices"][0]["stop_reason"], "END");
  g.stop_string.clear();
  g.stop_token = 42;
  EXPECT_EQ(Json::parse(reply_body(head, g))["choices"][0]["stop_reason"], 42);
}

TEST(Stream, a_chat_opens_with_the_role_and_closes_with_reason_usage_and_done) {
  ReplyHead head = kChat;
  head.include_usage = true;
  const auto opening = events_of(opening_event(head));
  ASSERT_EQ(opening.size(), 1u);
  EXPECT_EQ(opening[0]["object"], "chat.completion.chunk");
  EXPECT_EQ(opening[0]["choices"][0]["delta"], (Json{{"role", "assistant"}, {"content", ""}}));
  EXPECT_TRUE(opening[0]["choices"][0]["finish_reason"].is_null());
  EXPECT_TRUE(opening[0].contains("usage") && opening[0]["usage"].is_null());
  const auto closing = events_of(closing_events(head, sample()));
  ASSERT_EQ(closing.size(), 3u);
  EXPECT_EQ(closing[0]["choices"][0]["delta"], Json::object());
  EXPECT_EQ(closing[0]["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(closing[1]["choices"], Json::array());
  EXPECT_EQ(closing[1]["usage"]["total_tokens"], 10);
  EXPECT_EQ(closing[2], "[DONE]");
}

TEST(Stream, without_include_usage_nothing_about_usage_is_sent) {
  const auto closing = events_of(closing_events(kChat, sample()));
  ASSERT_EQ(closing.size(), 2u);
  EXPECT_FALSE(closing[0].contains("usage"));
  EXPECT_EQ(closing[1], "[DONE]");
}

TEST(Stream, reasoning_and_content_never_share_a_delta) {
  const auto events = events_of(delta_events(kChat, {.reasoning = "r", .content = "c"}));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["choices"][0]["delta"], (Json{{"reasoning_content", "r"}, {"reasoning", "r"}}));
  EXPECT_EQ(events[1]["choices"][0]["delta"], (Json{{"content", "c"}}));
  EXPECT_EQ(delta_events(kChat, {}), "");
}

TEST(Stream, completions_send_text) {
  ReplyHead head = kChat;
  head.is_chat = false;
  EXPECT_EQ(opening_event(head), "");
  const auto events = events_of(delta_events(head, {.reasoning = "", .content = "line\nbreak"}));
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["choices"][0]["text"], "line\nbreak");
  EXPECT_EQ(events[0]["object"], "text_completion");
}

TEST(Stream, an_error_in_a_stream_is_an_event_and_then_done) {
  const auto events = events_of(error_events(shutting_down()));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["error"]["code"], "draining");
  EXPECT_EQ(events[1], "[DONE]");
}

TEST(StreamFraming, chunks_for_http_1_1_and_plain_bytes_for_http_1_0) {
  EXPECT_EQ(stream_piece(1, "hello, world 1234"), "11\r\nhello, world 1234\r\n");
  EXPECT_EQ(stream_piece(1, ""), "") << "an empty chunk would end the body";
  EXPECT_EQ(stream_end(1), "0\r\n\r\n");
  EXPECT_EQ(stream_piece(0, "x"), "x");
  EXPECT_EQ(stream_end(0), "");
  EXPECT_NE(stream_head(1, true, "id", "s").find("Transfer-Encoding: chunked\r\n"), std::string::npos);
  EXPECT_EQ(stream_head(0, false, "id", "s").find("Transfer-Encoding"), std::string::npos);
  EXPECT_NE(stream_head(1, true, "id", "s").find("Content-Type: text/event-stream"), std::string::npos);
}

TEST(Errors, the_envelope_has_all_four_fields_and_the_table_is_complete) {
  const Json body = Json::parse(error_body(bad_field("stop", "stop: no")));
  EXPECT_EQ(body, (Json{{"error", {{"message", "stop: no"}, {"type", "invalid_request_error"}, {"param", "stop"}, {"code", nullptr}}}}));
  EXPECT_EQ(error_from_status(invalid_argument("x")).status, 400);
  EXPECT_EQ(error_from_status(unimplemented("x")).code, "unsupported_value");
  EXPECT_EQ(error_from_status(not_found("x")).status, 404);
  EXPECT_EQ(error_from_status(resource_exhausted("x")).status, 503);
  EXPECT_EQ(error_from_status(unavailable("x")).retry_after_seconds, 5);
  EXPECT_EQ(error_from_status({StatusCode::kDeadlineExceeded, "x"}).status, 504);
  EXPECT_EQ(error_from_status(data_loss("x")).status, 500);
  EXPECT_EQ(error_from_status(internal_error("x")).code, "internal_error");
}

TEST(Errors, replies_carry_the_headers_that_clients_act_on) {
  const auto header = [](const HttpReply& reply, const std::string& name) {
    for (const auto& [key, value] : reply.headers) {
      if (key == name) return value;
    }
    return std::string();
  };
  const HttpReply full = error_reply(queue_full(4, 9));
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(header(full, "Retry-After"), "9");
  EXPECT_EQ(header(full, "retry-after-ms"), "9000");
  EXPECT_EQ(header(error_reply(error_from_status(internal_error("x"))), "x-should-retry"), "false");
  EXPECT_EQ(header(error_reply({.status = 401}), "WWW-Authenticate"), "Bearer");
}

TEST(Errors, text_that_is_not_utf8_is_still_valid_json) {
  EXPECT_TRUE(Json::accept(error_body(bad_field("p", "found '\xff\xfe'"))));
}

TEST(RequestIds, valid_ones_of_the_client_are_kept) {
  EXPECT_EQ(choose_request_id("abc-1.2:x_Y"), "abc-1.2:x_Y");
  for (const std::string& bad : {std::string(), std::string("a b"), std::string("a\r\nb"), std::string(129, 'a')}) {
    const std::string id = choose_request_id(bad);
    EXPECT_EQ(id.compare(0, 4, "req_"), 0);
    EXPECT_EQ(id.size(), 28u);
  }
  EXPECT_NE(choose_request_id(""), choose_request_id(""));
}

TEST(RecordLine, holds_counts_and_never_text) {
  RequestRecord record{.id = "r1", .method = "POST", .path = "/v1/chat/completions", .status = 200, .is_generation = true};
  record.generation = sample();
  const std::string line = record_line(record);
  const Json json = Json::parse(line);
  EXPECT_EQ(json["id"], "r1");
  EXPECT_EQ(json["prompt_tokens"], 7);
  EXPECT_EQ(json["completion_tokens"], 3);
  EXPECT_EQ(json["finish"], "stop");
  EXPECT_EQ(line.find("you"), std::string::npos);
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

TEST(Models, list_and_card) {
  const ModelCard card{"pocket", 5, 1024};
  const Json list = Json::parse(models_body({card}));
  EXPECT_EQ(list["object"], "list");
  EXPECT_EQ(list["data"][0]["id"], "pocket");
  EXPECT_EQ(list["data"][0]["max_model_len"], 1024);
  EXPECT_EQ(Json::parse(model_body(card)), list["data"][0]);
}

}  // namespace
}  // namespace espalier
