// The HTTP server: connections, limits, timeouts, streams, and a clean end. One thread moves bytes, one tokenises bodies, one
// (the worker) computes; none waits for another's client.
//
// A client that goes away while the model computes cancels its request within a token. A half-closed connection counts as gone.
// Source: docs/api.md, "Connections"; HTTP/1.1 by Boost.Beast, which only server.cpp sees.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "runtime/generation.h"
#include "serve/service.h"

namespace espalier {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;          // 0: any free port
  int max_queue = 16;       // requests that may wait beside the running one
  int max_connections = 1024;
  uint64_t max_body_bytes = uint64_t{16} << 20;
  uint32_t max_header_bytes = 64 << 10;
  int max_headers = 200;
  double header_seconds = 10;    // to send a request's head
  double body_seconds = 30;      // without progress of a body
  double idle_seconds = 75;      // between requests of a connection
  double write_seconds = 30;     // without progress of a reply
  double keepalive_seconds = 10; // of silence before a comment is sent in a stream
  double drain_seconds = 20;     // after a stop, for the running request to finish
};

// Receives one line of JSON per finished request; called on the server's thread.
using RequestLog = std::function<void(const std::string& line)>;

class Server {
 public:
  // Binds the address. service and generator must outlive the server.
  // Errors: invalid_argument (host or port), unavailable (address in use, not permitted).
  static Result<std::unique_ptr<Server>> open(Service& service, TextGenerator& generator, const ServerOptions& options,
                                              RequestLog log);
  ~Server();

  int port() const;
  std::string url() const;  // "http://127.0.0.1:8000"

  // Serves until should_stop() is true (asked about ten times a second), then refuses new requests, lets the running one
  // finish for drain_seconds, cancels what is left and returns.
  Status run(const std::function<bool()>& should_stop);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace espalier
