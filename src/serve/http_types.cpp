#include "serve/http_types.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

#include "format/json.h"

namespace espalier {
namespace {

std::mt19937_64& generator() {
  thread_local std::mt19937_64 engine = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device(), device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  return engine;
}

bool is_id_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '.' || c == ':' ||
         c == '-';
}

double milliseconds(double seconds) { return std::round(seconds * 1e4) / 10; }

}  // namespace

HttpReply error_reply(const ApiError& error) {
  HttpReply reply{.status = error.status, .body = error_body(error)};
  if (error.retry_after_seconds > 0) {
    reply.headers.emplace_back("Retry-After", std::to_string(error.retry_after_seconds));
    reply.headers.emplace_back("retry-after-ms", std::to_string(error.retry_after_seconds * 1000));
  }
  if (error.status == 401) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.status == 405) reply.headers.emplace_back("Allow", error.allow);
  if (error.status == 500) reply.headers.emplace_back("x-should-retry", "false");
  return reply;
}

std::string random_name(size_t n) {
  static constexpr std::string_view kAlphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  std::uniform_int_distribution<size_t> pick(0, kAlphabet.size() - 1);
  std::string name;
  while (name.size() < n) name += kAlphabet[pick(generator())];
  return name;
}

uint64_t random_seed() { return generator()() >> 11; }

std::string choose_request_id(const std::string& from_client) {
  const bool is_valid = !from_client.empty() && from_client.size() <= 128 &&
                        std::all_of(from_client.begin(), from_client.end(), is_id_char);
  return is_valid ? from_client : "req_" + random_name(24);
}

std::string stream_head(int http_minor, bool keep_alive, std::string_view request_id, std::string_view server) {
  std::string head = "HTTP/1." + std::to_string(http_minor) + " 200 OK\r\n";
  head += "Server: " + std::string(server) + "\r\n";
  head += "Content-Type: text/event-stream; charset=utf-8\r\n";
  head += "Cache-Control: no-cache, no-transform\r\n";
  head += "X-Accel-Buffering: no\r\n";
  head += "x-request-id: " + std::string(request_id) + "\r\n";
  head += keep_alive ? "Connection: keep-alive\r\n" : "Connection: close\r\n";
  if (http_minor > 0) head += "Transfer-Encoding: chunked\r\n";
  return head + "\r\n";
}

std::string stream_piece(int http_minor, std::string_view text) {
  if (http_minor == 0 || text.empty()) return std::string(text);  // an empty chunk would end the body
  char size[20];
  std::snprintf(size, sizeof size, "%zx\r\n", text.size());
  return size + std::string(text) + "\r\n";
}

std::string stream_end(int http_minor) { return http_minor == 0 ? "" : "0\r\n\r\n"; }

std::string record_line(const RequestRecord& record) {
  Json line = {{"id", record.id},
               {"method", record.method},
               {"path", record.path},
               {"status", record.status},
               {"total_ms", milliseconds(record.total_seconds)}};
  if (record.is_generation) {
    const Generation& g = record.generation;
    line["stream"] = record.stream;
    line["prompt_tokens"] = g.n_prompt;
    line["completion_tokens"] = g.token_ids.size();
    line["reasoning_tokens"] = g.n_reasoning;
    line["queue_ms"] = milliseconds(record.queue_seconds);
    line["ttft_ms"] = record.first_text_seconds < 0 ? Json(nullptr) : Json(milliseconds(record.first_text_seconds));
    line["prefill_ms"] = milliseconds(g.prefill_seconds);
    line["decode_ms"] = milliseconds(g.decode_seconds);
    line["finish"] = record.status == 499 ? "client_gone" : finish_reason_name(g.finish_reason);
    line["drafted"] = g.drafted;
    line["accepted"] = g.accepted;
    line["seed"] = record.seed;
  }
  return dump_json(line);
}

}  // namespace espalier
