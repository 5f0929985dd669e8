// HTTP as the rest of serve sees it, free of any HTTP library: the head of a request, a whole reply, the framing of streams, and
// the line that is logged for every request.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/generation.h"
#include "serve/api_error.h"

namespace espalier {

struct RequestHead {
  std::string method = {};
  std::string target = {};  // as sent: path and query
  std::string authorization = {};
  std::string x_api_key = {};
  std::string x_request_id = {};
  std::string content_encoding = {};
};

struct HttpReply {
  int status = 200;
  std::string body = {};
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string content_type = "application/json";
};

HttpReply error_reply(const ApiError& error);

// The client's id when it is 1 to 128 characters of [A-Za-z0-9_.:-], else a new one.
std::string choose_request_id(const std::string& from_client);
// `n` random characters of [0-9a-zA-Z]. Threads: any.
std::string random_name(size_t n);
// Uniform in [0, 2^53), exact in every JSON reader. Threads: any.
uint64_t random_seed();

// The head of an event stream. http_minor 0 (HTTP/1.0) gets no chunked coding and is closed at the end.
std::string stream_head(int http_minor, bool keep_alive, std::string_view request_id, std::string_view server);
// One piece of the body in the coding of stream_head, and the end of the body.
std::string stream_piece(int http_minor, std::string_view text);
std::string stream_end(int http_minor);

// What is logged about a request.
struct RequestRecord {
  std::string id = {};
  std::string method = {};
  std::string path = {};
  int status = 0;  // 499: the client went away
  bool is_generation = false;
  bool stream = false;
  double total_seconds = 0;
  double queue_seconds = 0;        // until the engine took it
  double first_text_seconds = -1;  // until the first text; -1: none
  uint64_t seed = 0;
  Generation generation = {};      // counts and times; the text is never logged
};

// One line of JSON.
std::string record_line(const RequestRecord& record);

}  // namespace espalier
