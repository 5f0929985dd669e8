#include "serve/server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "format/json.h"
#include "runtime/engine.h"
#include "tests/unit/runtime/small_model.h"

namespace espalier {
namespace {

using namespace std::chrono_literals;

// A raw TCP client, so that malformed and half-sent requests can be written.
class Client {
 public:
  explicit Client(int port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    timeval limit{.tv_sec = 20, .tv_usec = 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~Client() { close(); }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  void send(std::string_view text) { EXPECT_EQ(::send(fd_, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size())); }

  // Reads until the text contains `mark`, the peer closes or nothing comes for 20 s.
  std::string read_until(std::string_view mark) {
    while (received_.find(mark) == std::string::npos && read_some()) {
    }
    return received_;
  }
  std::string read_all() {
    while (read_some()) {
    }
    return received_;
  }
  // One whole reply with Content-Length; later bytes stay for the next call.
  std::string read_reply() {
    read_until("\r\n\r\n");
    const size_t head = received_.find("\r\n\r\n");
    if (head == std::string::npos) return std::exchange(received_, {});
    const size_t at = received_.find("Content-Length: ");
    const size_t length = at < head ? std::stoul(received_.substr(at + 16)) : 0;
    while (received_.size() < head + 4 + length && read_some()) {
    }
    std::string reply = received_.substr(0, head + 4 + length);
    received_.erase(0, reply.size());
    return reply;
  }

 private:
  bool read_some() {
    char chunk[4096];
    const ssize_t n = ::recv(fd_, chunk, sizeof chunk, 0);
    if (n <= 0) return false;
    received_.append(chunk, static_cast<size_t>(n));
    return true;
  }

  int fd_;
  std::string received_;
};

// An engine with a pause per token, behind a running server.
class ServerTest : public ::testing::Test {
 protected:
  void start(ServerOptions options = {}, std::chrono::milliseconds pause = 0ms) {
    const Rule inner = hash_rule(512);
    const Rule rule = [this, inner, pause](std::span<const int32_t> history) {
      ++n_steps_;
      if (pause > 0ms) std::this_thread::sleep_for(pause);
      return inner(history);
    };
    engine_ = *Engine::create(std::make_shared<SmallModel>(512, rule), golden_tokenizer(), {.context = 2048});
    service_ = std::make_unique<Service>(*engine_, ServiceOptions{.rules = {.served_name = "small"}, .keys = {}, .created = 1, .version = "t"});
    options.port = 0;
    auto opened = Server::open(*service_, *engine_, options, [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      log_.push_back(Json::parse(line));
    });
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    server_ = std::move(*opened);
    thread_ = std::thread([this] { run_status_ = server_->run([this] { return stop_.load(); }); });
  }

  void stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void TearDown() override {
    stop();
    EXPECT_TRUE(run_status_.ok());
  }

  Client client() { return Client(server_->port()); }

  std::string ask(const std::string& request) {
    Client c = client();
    c.send(request);
    return c.read_reply();
  }

  static std::string post(const std::string& path, const std::string& body, const std::string& headers = "") {
    return "POST " + path + " HTTP/1.1\r\nHost: x\r\n" + headers + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }
  static std::string completion(int max_tokens, const std::string& more = "") {
    return R"({"prompt":[5,6,7],"temperature":0,"max_tokens":)" + std::to_string(max_tokens) + more + "}";
  }
  static Json body_of(const std::string& reply) {
    const size_t at = reply.find("\r\n\r\n");
    EXPECT_NE(at, std::string::npos) << reply;
    return at == std::string::npos ? Json() : Json::parse(reply.substr(at + 4), nullptr, false);
  }
  static int status_of(const std::string& reply) { return reply.size() > 12 ? std::stoi(reply.substr(9, 3)) : 0; }

  // The log line of the request with this id, waiting for it.
  Json logged(const std::string& id) {
    for (int i = 0; i < 500; ++i) {
      {
        const std::lock_guard lock(mutex_);
        for (const Json& line : log_) {
          if (line["id"] == id) return line;
        }
      }
      std::this_thread::sleep_for(10ms);
    }
    ADD_FAILURE() << "no log line for " << id;
    return {};
  }

  std::atomic<int64_t> n_steps_{0};
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  Status run_status_;
  std::mutex mutex_;
  std::vector<Json> log_;
};

// The text of all content in a stream of events.
std::string streamed_text(const std::string& stream) {
  std::string text;
  for (size_t at = stream.find("data: {"); at != std::string::npos; at = stream.find("data: {", at + 1)) {
    const Json event = Json::parse(stream.substr(at + 6, stream.find('\n', at) - at - 6));
    if (!event["choices"].empty() && event["choices"][0].contains("text")) text += event["choices"][0]["text"].get<std::string>();
  }
  return text;
}

TEST_F(ServerTest, a_stream_says_the_same_as_a_whole_reply) {
  start();
  const std::string whole = body_of(ask(post("/v1/completions", completion(40))))["choices"][0]["text"];
  Client c = client();
  c.send(post("/v1/completions", completion(40, R"(,"stream":true)")));
  const std::string stream = c.read_until("0\r\n\r\n");
  EXPECT_NE(stream.find("data: [DONE]\n\n"), std::string::npos);
  EXPECT_EQ(streamed_text(stream), whole);
  EXPECT_FALSE(whole.empty());
  c.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_NE(c.read_until("{\"status\":\"ok\"}").find("{\"status\":\"ok\"}"), std::string::npos) << "the connection stays usable";
}

TEST_F(ServerTest, requests_may_be_pipelined_behind_a_running_one) {
  start({}, 2ms);
  Client c = client();
  c.send(post("/v1/completions", completion(20)) + "GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + post("/v1/completions", completion(3)));
  EXPECT_EQ(body_of(c.read_reply())["usage"]["completion_tokens"], 20);
  EXPECT_EQ(body_of(c.read_reply())["status"], "ok");
  EXPECT_EQ(body_of(c.read_reply())["usage"]["completion_tokens"], 3);
}

TEST_F(ServerTest, a_client_that_goes_away_cancels_its_request) {
  start({}, 2ms);
  Client c = client();
  c.send(post("/v1/completions", completion(2000), "x-request-id: gone\r\n"));
  while (n_steps_ < 5) std::this_thread::sleep_for(1ms);
  c.close();
  const Json line = logged("gone");
  EXPECT_EQ(line["status"], 499);
  EXPECT_EQ(line["finish"], "client_gone");
  EXPECT_LT(n_steps_, 1000) << "the engine went on after the client left";
  EXPECT_EQ(status_of(ask(post("/v1/completions", completion(2)))), 200);
}

TEST_F(ServerTest, a_client_that_leaves_in_mid_stream_cancels_too) {
  start({}, 2ms);
  Client c = client();
  c.send(post("/v1/completions", completion(2000, R"(,"stream":true)"), "x-request-id: gone2\r\n"));
  c.read_until("data: {");
  c.close();
  EXPECT_EQ(logged("gone2")["status"], 499);
  EXPECT_LT(n_steps_, 1000);
}

TEST_F(ServerTest, the_queue_is_bounded_and_says_when_to_come_back) {
  start({.max_queue = 1}, 2ms);
  Client first = client();
  first.send(post("/v1/completions", completion(300)));
  while (n_steps_ < 2) std::this_thread::sleep_for(1ms);
  Client second = client();
  second.send(post("/v1/completions", completion(2)));
  std::this_thread::sleep_for(50ms);
  const std::string refused = ask(post("/v1/completions", completion(2)));
  EXPECT_EQ(status_of(refused), 429);
  EXPECT_NE(refused.find("Retry-After: "), std::string::npos);
  EXPECT_EQ(body_of(refused)["error"]["code"], "rate_limit_exceeded");
  EXPECT_EQ(status_of(first.read_reply()), 200);
  EXPECT_EQ(status_of(second.read_reply()), 200);
}

TEST_F(ServerTest, silence_in_a_stream_is_filled_with_comments) {
  start({.keepalive_seconds = 0.05}, 200ms);
  Client c = client();
  c.send(post("/v1/completions", completion(2, R"(,"stream":true)")));
  const std::string stream = c.read_until("[DONE]");
  EXPECT_NE(stream.find(": keepalive\n\n"), std::string::npos);
  EXPECT_LT(stream.find(": keepalive"), stream.find("data: ")) << "headers and a comment come before the first token";
}

TEST_F(ServerTest, http_1_0_streams_end_with_the_connection) {
  start();
  Client c = client();
  const std::string body = completion(5, R"(,"stream":true)");
  c.send("POST /v1/completions HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
  const std::string stream = c.read_all();
  EXPECT_EQ(stream.find("chunked"), std::string::npos);
  EXPECT_NE(stream.find("Connection: close"), std::string::npos);
  EXPECT_EQ(stream.substr(stream.size() - 14), "data: [DONE]\n\n");
}

TEST_F(ServerTest, chunked_bodies_and_expect_continue_are_understood) {
  start();
  const std::string body = completion(2);
  Client c = client();
  c.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_NE(c.read_until("\r\n\r\n").find("100 Continue"), std::string::npos);
  c.read_reply();
  char size[16];
  std::snprintf(size, sizeof size, "%zx", body.size() - 4);
  c.send(std::string("4\r\n") + body.substr(0, 4) + "\r\n" + size + "\r\n" + body.substr(4) + "\r\n0\r\n\r\n");
  EXPECT_EQ(status_of(c.read_reply()), 200);
}

TEST_F(ServerTest, oversized_bodies_and_heads_are_refused_without_being_read) {
  start({.max_body_bytes = 1000, .max_header_bytes = 4096, .max_headers = 20});
  EXPECT_EQ(status_of(ask("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")), 413);
  const std::string chunk = "400\r\n" + std::string(1024, ' ') + "\r\n";
  EXPECT_EQ(status_of(ask("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk + chunk)), 413);
  EXPECT_EQ(status_of(ask("GET /health HTTP/1.1\r\nX: " + std::string(5000, 'a') + "\r\n\r\n")), 431);
  std::string many = "GET /health HTTP/1.1\r\n";
  for (int i = 0; i < 30; ++i) many += "H" + std::to_string(i) + ": v\r\n";
  EXPECT_EQ(status_of(ask(many + "\r\n")), 431);
  EXPECT_EQ(status_of(ask("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")), 200);
}

TEST_F(ServerTest, malformed_requests_get_400_and_the_server_goes_on) {
  start();
  for (const std::string& bytes : {std::string("\r\n\r\n\r\nGARBAGE\r\n\r\n"), std::string("GET\r\n\r\n"),
                                   std::string("GET /health HTTP/9.9\r\n\r\n"), std::string("GET /health HTTP/1.1\r\nbad header\r\n\r\n"),
                                   std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls hello \r\n\r\n", 34),
                                   std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
                                   std::string("POST /v1/completions HTTP/1.1\r\nContent-Length: abc\r\n\r\n"),
                                   std::string("POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"),
                                   std::string("POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"),
                                   std::string("POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"),
                                   std::string("POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
                                   std::string("GET /\x01 HTTP/1.1\r\n\r\n")}) {
    const std::string reply = ask(bytes);
    EXPECT_EQ(status_of(reply), 400) << bytes;
    EXPECT_EQ(body_of(reply)["error"]["type"], "invalid_request_error") << bytes;
    EXPECT_NE(reply.find("Connection: close"), std::string::npos) << bytes;
  }
  EXPECT_EQ(status_of(ask("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")), 200);
}

TEST_F(ServerTest, slow_heads_and_bodies_are_cut_off) {
  start({.header_seconds = 0.2, .body_seconds = 0.2});
  for (const char* start_of_request : {"", "GET /hea", "POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{"}) {
    Client c = client();
    if (*start_of_request != '\0') c.send(start_of_request);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(c.read_all(), "");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  }
  EXPECT_EQ(status_of(ask("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")), 200);
}

TEST_F(ServerTest, replies_echo_valid_request_ids_and_refused_bodies_end_the_connection) {
  start();
  const std::string reply = ask("GET /nowhere HTTP/1.1\r\nx-request-id: my-id\r\n\r\n");
  EXPECT_EQ(status_of(reply), 404);
  EXPECT_NE(reply.find("x-request-id: my-id\r\n"), std::string::npos);
  EXPECT_EQ(reply.find("Connection: close"), std::string::npos);
  EXPECT_NE(ask("POST /nowhere HTTP/1.1\r\nContent-Length: 9\r\n\r\n123456789").find("Connection: close"), std::string::npos);
}

TEST_F(ServerTest, a_stop_lets_the_running_request_finish_and_refuses_new_ones) {
  start({}, 3ms);
  Client c = client();
  c.send(post("/v1/completions", completion(100)));
  while (n_steps_ < 3) std::this_thread::sleep_for(1ms);
  Client idle = client();
  idle.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  idle.read_reply();
  stop_ = true;
  EXPECT_EQ(idle.read_all(), "") << "idle connections are closed";
  const std::string refused = ask(post("/v1/completions", completion(2)));
  EXPECT_EQ(status_of(refused), 503);
  EXPECT_EQ(body_of(c.read_reply())["usage"]["completion_tokens"], 100);
  stop();
}

TEST_F(ServerTest, what_does_not_finish_in_time_is_cancelled_with_503) {
  start({.drain_seconds = 0.1}, 5ms);
  Client c = client();
  c.send(post("/v1/completions", completion(2000)));
  Client streaming = client();
  streaming.send(post("/v1/completions", completion(2000, R"(,"stream":true)")));
  while (n_steps_ < 3) std::this_thread::sleep_for(1ms);
  stop();
  EXPECT_LT(n_steps_, 400);
  EXPECT_EQ(status_of(c.read_reply()), 503);
  EXPECT_NE(streaming.read_all().find("draining"), std::string::npos);
}

TEST_F(ServerTest, a_port_in_use_is_unavailable_and_a_bad_host_invalid) {
  start();
  auto second = Server::open(*service_, *engine_, {.port = server_->port()}, nullptr);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code(), StatusCode::kUnavailable);
  EXPECT_NE(second.error().message().find("--port"), std::string::npos);
  EXPECT_EQ(Server::open(*service_, *engine_, {.host = "not a host", .port = 0}, nullptr).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace espalier
