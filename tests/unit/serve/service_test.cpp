#include "serve/service.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "runtime/engine.h"
#include "tests/unit/runtime/small_model.h"

namespace espalier {
namespace {

class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest() {
    engine_ = *Engine::create(std::make_shared<SmallModel>(512, hash_rule(512)), golden_tokenizer(), {.context = 128});
  }

  Service make(ApiKeys keys = {}) {
    return Service(*engine_, {.rules = {.served_name = "org/pocket"}, .keys = std::move(keys), .created = 1, .version = "9"});
  }

  static HttpReply reply_of(const Service& service, RequestHead head) {
    auto routed = service.route(head);
    const auto* reply = std::get_if<HttpReply>(&routed);
    EXPECT_NE(reply, nullptr) << head.target << " wants a body";
    return reply != nullptr ? *reply : HttpReply{};
  }

  static ApiKeys keys(const std::string& text) {
    const auto path = std::filesystem::path(::testing::TempDir()) / "espalier_keys_test";
    std::ofstream(path) << text;
    Result<ApiKeys> loaded = ApiKeys::load(path);
    std::filesystem::remove(path);
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    return loaded.ok() ? std::move(*loaded) : ApiKeys();
  }

  std::unique_ptr<Engine> engine_;
};

TEST_F(ServiceTest, calls_are_routed_with_and_without_v1_slash_and_query) {
  const Service service = make();
  for (const char* target : {"/v1/chat/completions", "/chat/completions", "/v1/chat/completions/", "/v1/chat/completions?a=b"}) {
    const auto routed = service.route({.method = "POST", .target = target});
    ASSERT_TRUE(std::holds_alternative<Endpoint>(routed)) << target;
    EXPECT_EQ(std::get<Endpoint>(routed), Endpoint::kChatCompletions);
  }
  EXPECT_EQ(std::get<Endpoint>(service.route({.method = "POST", .target = "/v1/completions"})), Endpoint::kCompletions);
}

TEST_F(ServiceTest, models_health_and_version) {
  const Service service = make();
  EXPECT_EQ(reply_of(service, {.method = "GET", .target = "/health"}).body, R"({"status":"ok"})");
  EXPECT_NE(reply_of(service, {.method = "GET", .target = "/v1/models"}).body.find(R"("max_model_len":128)"), std::string::npos);
  EXPECT_EQ(reply_of(service, {.method = "GET", .target = "/v1/models/org/pocket"}).status, 200);
  EXPECT_EQ(reply_of(service, {.method = "GET", .target = "/v1/models/org%2Fpocket"}).status, 200);
  const HttpReply missing = reply_of(service, {.method = "GET", .target = "/v1/models/gpt"});
  EXPECT_EQ(missing.status, 404);
  EXPECT_NE(missing.body.find("model_not_found"), std::string::npos);
  EXPECT_EQ(reply_of(service, {.method = "GET", .target = "/version"}).body, R"({"version":"9"})");
}

TEST_F(ServiceTest, unknown_routes_are_404_and_wrong_methods_405_with_allow) {
  const Service service = make();
  for (const char* target : {"/", "", "/v1", "/v1/embeddings", "/v1/models2", "/%00", "/v1/chat"}) {
    EXPECT_EQ(reply_of(service, {.method = "POST", .target = target}).status, 404) << target;
  }
  const HttpReply reply = reply_of(service, {.method = "GET", .target = "/v1/chat/completions"});
  EXPECT_EQ(reply.status, 405);
  ASSERT_FALSE(reply.headers.empty());
  EXPECT_EQ(reply.headers[0], (std::pair<std::string, std::string>{"Allow", "POST, OPTIONS"}));
  EXPECT_EQ(reply_of(service, {.method = "DELETE", .target = "/health"}).status, 405);
  EXPECT_EQ(reply_of(service, {.method = "OPTIONS", .target = "/v1/completions"}).status, 204);
}

TEST_F(ServiceTest, keys_protect_everything_but_health) {
  const Service service = make(keys("# comment\n\n  sk-one \r\nsk-two"));
  const auto status = [&](const std::string& authorization, const std::string& x_api_key) {
    return reply_of(service, {.method = "GET", .target = "/v1/models", .authorization = authorization, .x_api_key = x_api_key}).status;
  };
  EXPECT_EQ(status("Bearer sk-one", ""), 200);
  EXPECT_EQ(status("bearer sk-two", ""), 200);
  EXPECT_EQ(status("", "sk-one"), 200);
  for (const char* wrong : {"", "sk-one", "Bearer", "Bearer ", "Bearer sk-on", "Bearer sk-one ", "Basic sk-one", "Bearer # comment"}) {
    EXPECT_EQ(status(wrong, ""), 401) << wrong;
  }
  EXPECT_EQ(reply_of(service, {.method = "GET", .target = "/health"}).status, 200);
  EXPECT_EQ(reply_of(service, {.method = "POST", .target = "/v1/completions"}).status, 401) << "before the body is read";
}

TEST_F(ServiceTest, a_key_file_without_keys_is_refused) {
  const auto path = std::filesystem::path(::testing::TempDir()) / "espalier_no_keys_test";
  std::ofstream(path) << "# only a comment\n\n";
  const Result<ApiKeys> loaded = ApiKeys::load(path);
  std::filesystem::remove(path);
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.error().code(), StatusCode::kDataLoss);
  EXPECT_EQ(ApiKeys::load("/nonexistent/keys").status().code(), StatusCode::kNotFound);
}

TEST_F(ServiceTest, coded_bodies_are_415_and_draining_refuses_calls) {
  Service service = make();
  EXPECT_EQ(reply_of(service, {.method = "POST", .target = "/v1/completions", .content_encoding = "gzip"}).status, 415);
  service.start_draining();
  EXPECT_EQ(reply_of(service, {.method = "POST", .target = "/v1/completions"}).status, 503);
  EXPECT_EQ(reply_of(service, {.method = "GET", .target = "/health"}).status, 503);
  EXPECT_EQ(reply_of(service, {.method = "GET", .target = "/v1/models"}).status, 200);
}

TEST_F(ServiceTest, prepared_calls_have_ids_of_their_kind_and_a_seed) {
  const Service service = make();
  const auto chat = service.prepare(Endpoint::kChatCompletions, R"({"messages":[{"role":"user","content":"a"}],"reasoning_effort":"none"})");
  ASSERT_TRUE(std::holds_alternative<PreparedCall>(chat));
  EXPECT_EQ(std::get<PreparedCall>(chat).head.id.compare(0, 9, "chatcmpl-"), 0);
  EXPECT_EQ(std::get<PreparedCall>(chat).head.id.size(), 33u);
  EXPECT_FALSE(std::get<PreparedCall>(chat).head.thinking);
  const auto text = service.prepare(Endpoint::kCompletions, R"({"prompt":"a","seed":5})");
  ASSERT_TRUE(std::holds_alternative<PreparedCall>(text));
  EXPECT_EQ(std::get<PreparedCall>(text).head.id.compare(0, 5, "cmpl-"), 0);
  EXPECT_EQ(std::get<PreparedCall>(text).head.seed, 5u);
  EXPECT_FALSE(std::get<PreparedCall>(text).generation.prompt_ids.empty());
}

TEST(PathOf, strips_queries_slashes_and_escapes) {
  EXPECT_EQ(path_of("/a/b/?x=1#y"), "/a/b");
  EXPECT_EQ(path_of("/"), "/");
  EXPECT_EQ(path_of("///"), "/");
  EXPECT_EQ(path_of("/a%2fb%zz%4"), "/a/b%zz%4");
  EXPECT_EQ(path_of(""), "");
}

}  // namespace
}  // namespace espalier
