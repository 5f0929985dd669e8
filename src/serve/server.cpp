#include "serve/server.h"

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <optional>
#include <set>
#include <utility>

#include "serve/worker.h"

namespace espalier {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::awaitable;
using asio::redirect_error;
using asio::use_awaitable;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr size_t kBufferBytes = 256 << 10;       // of one connection, headers and read-ahead
constexpr size_t kReadAheadBytes = 64 << 10;     // of a next request, while the model computes
constexpr uint64_t kLingerBytes = 64 << 20;      // read and dropped after a refusal, so that the client sees the reply
constexpr double kLingerSeconds = 2;
constexpr double kForceCloseSeconds = 5;         // after the drain, for replies to be written
constexpr double kBodyPatience = 10;             // times body_seconds, for a whole body

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class Connection;

// What all connections share. Everything here but `worker` and `prepare_pool` is touched by the io thread only.
struct Core {
  Core(Service& s, TextGenerator& generator, const ServerOptions& o, RequestLog l)
      : service(s), options(o), log(std::move(l)), server_name("espalier/" + s.version()), worker(generator, o.max_queue) {}

  Service& service;
  const ServerOptions options;
  const RequestLog log;
  const std::string server_name;
  std::set<Connection*> connections;  // before `io`, whose end destroys what is left of them
  int n_calls = 0;                    // being read, queued, computed or sent
  bool draining = false;
  asio::io_context io{1};
  asio::thread_pool prepare_pool{1};
  Worker worker;  // last: its thread posts to `io` until it is joined
};

// What the worker has made of a job so far, on the io thread's side.
struct Outbox {
  explicit Outbox(asio::io_context& io) : wake(io) {}

  asio::steady_timer wake;
  std::vector<ReplyDelta> deltas;
  std::optional<Result<Generation>> result;
  std::optional<Clock::time_point> started;
  std::optional<Clock::time_point> first_text;
  bool client_gone = false;
  bool closed = false;  // the reply is finished; the socket is no longer watched

  bool is_ready() const { return !deltas.empty() || result.has_value() || client_gone; }
};

std::shared_ptr<Job> make_job(GenerationRequest request, asio::io_context& io, const std::shared_ptr<Outbox>& outbox) {
  auto job = std::make_shared<Job>();
  job->request = std::move(request);
  job->on_start = [&io, outbox] { asio::post(io, [outbox, now = Clock::now()] { outbox->started = now; }); };
  job->on_delta = [&io, outbox](const ReplyDelta& delta) {
    asio::post(io, [outbox, delta] {
      if (!outbox->first_text) outbox->first_text = Clock::now();
      outbox->deltas.push_back(delta);
      outbox->wake.cancel();
    });
  };
  job->on_done = [&io, outbox](Result<Generation> result) {
    asio::post(io, [outbox, result = std::move(result)]() mutable {
      outbox->result.emplace(std::move(result));
      outbox->wake.cancel();
    });
  };
  return job;
}

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Core& core, tcp::socket socket) : core_(core), stream_(std::move(socket)), buffer_(kBufferBytes) {
    core_.connections.insert(this);
  }
  ~Connection() { core_.connections.erase(this); }

  // Serves requests until the client or the server ends the connection.
  awaitable<void> run() {
    const auto self = shared_from_this();
    error_code ec;
    for (bool is_first = true;; is_first = false) {
      if (buffer_.size() == 0) {
        is_idle_ = true;
        stream_.expires_after(duration_of(is_first ? core_.options.header_seconds : core_.options.idle_seconds));
        const size_t n = co_await stream_.async_read_some(buffer_.prepare(8192), redirect_error(use_awaitable, ec));
        is_idle_ = false;
        if (ec) break;
        buffer_.commit(n);
      }
      const bool keep = co_await serve_one();
      if (!keep || core_.draining) break;
    }
    co_await linger();
    close();
  }

  bool is_idle() const { return is_idle_; }  // between requests
  void close() {
    error_code ignored;
    stream_.socket().close(ignored);
  }

 private:
  using Parser = http::request_parser<http::string_body>;

  // One request and its reply; false when the connection must end.
  awaitable<bool> serve_one() {
    start_ = Clock::now();
    record_ = RequestRecord();
    error_code ec;
    Parser parser;
    parser.header_limit(core_.options.max_header_bytes);
    parser.body_limit(core_.options.max_body_bytes);
    stream_.expires_after(duration_of(core_.options.header_seconds));
    co_await http::async_read_header(stream_, buffer_, parser, redirect_error(use_awaitable, ec));
    const RequestHead head = read_head(parser);
    record_.id = choose_request_id(head.x_request_id);
    record_.method = head.method;
    record_.path = path_of(head.target);
    minor_ = parser.get().version() == 10 ? 0 : 1;
    if (ec) co_return co_await refuse_bytes(ec);
    if (std::distance(parser.get().begin(), parser.get().end()) > core_.options.max_headers) {
      co_return co_await send(error_reply(head_too_large(std::to_string(core_.options.max_headers) + " fields")), false);
    }

    auto routed = core_.service.route(head);
    if (auto* reply = std::get_if<HttpReply>(&routed)) {
      // A body that nobody wants is not read: the connection ends instead.
      const bool keep = parser.is_done() && parser.keep_alive() && head.method != "HEAD";
      if (head.method == "HEAD") reply->body.clear();
      co_return co_await send(std::move(*reply), keep);
    }

    if (beast::iequals(parser.get()[http::field::expect], "100-continue") && minor_ == 1 && !parser.is_done()) {
      const bool written = co_await write("HTTP/1.1 100 Continue\r\n\r\n");
      if (!written) co_return false;
    }
    while (!parser.is_done()) {
      if (seconds_since(start_) > kBodyPatience * core_.options.body_seconds) {
        co_return co_await send(error_reply(body_too_slow()), false);
      }
      stream_.expires_after(duration_of(core_.options.body_seconds));
      co_await http::async_read_some(stream_, buffer_, parser, redirect_error(use_awaitable, ec));
      if (ec) co_return co_await refuse_bytes(ec);
    }
    const bool keep_alive = parser.keep_alive();
    const std::string body = std::move(parser.get().body());
    co_return co_await generate(std::get<Endpoint>(routed), body, keep_alive);
  }

  static RequestHead read_head(const Parser& parser) {
    const auto& message = parser.get();
    const auto text = [&](beast::string_view name) { return std::string(message[name]); };
    return {.method = std::string(message.method_string()),
            .target = std::string(message.target()),
            .authorization = text("Authorization"),
            .x_api_key = text("x-api-key"),
            .x_request_id = text("x-request-id"),
            .content_encoding = text("Content-Encoding")};
  }

  // The bytes were no acceptable request; silent when the client went away or was too slow.
  awaitable<bool> refuse_bytes(error_code ec) {
    const error_code parse_error = http::make_error_code(http::error::bad_method);
    if (ec.category() != parse_error.category() || ec == http::error::end_of_stream || ec == http::error::partial_message) {
      co_return false;
    }
    ApiError error{.message = "The bytes are not an HTTP/1.1 request: " + ec.message() + "."};
    if (ec == http::error::body_limit) error = body_too_large(core_.options.max_body_bytes);
    if (ec == http::error::header_limit || ec == http::error::buffer_overflow) {
      error = head_too_large(std::to_string(core_.options.max_header_bytes) + " bytes");
    }
    co_return co_await send(error_reply(error), false);
  }

  awaitable<bool> write(std::string text) {
    error_code ec;
    stream_.expires_after(duration_of(core_.options.write_seconds));
    co_await asio::async_write(stream_, asio::buffer(text), redirect_error(use_awaitable, ec));
    co_return !ec;
  }

  // Sends a whole reply and logs the request; the value says whether the connection may go on.
  awaitable<bool> send(HttpReply reply, bool keep) {
    http::response<http::string_body> response{static_cast<http::status>(reply.status), minor_ == 0 ? 10u : 11u};
    response.set(http::field::server, core_.server_name);
    response.set("x-request-id", record_.id);
    if (reply.status != 204) response.set(http::field::content_type, reply.content_type);
    for (const auto& [name, value] : reply.headers) response.set(name, value);
    response.body() = std::move(reply.body);
    keep = keep && !core_.draining;
    response.keep_alive(keep);
    response.prepare_payload();
    error_code ec;
    stream_.expires_after(duration_of(core_.options.write_seconds));
    co_await http::async_write(stream_, response, redirect_error(use_awaitable, ec));
    finish_record(ec ? 499 : reply.status);
    co_return keep && !ec;
  }

  void finish_record(int status) {
    record_.status = status;
    record_.total_seconds = seconds_since(start_);
    if (core_.log) core_.log(record_line(record_));
  }

  // Parsing and tokenising happen on their own thread.
  awaitable<Outcome<PreparedCall>> prepare(Endpoint endpoint, const std::string& body) {
    const auto done = std::make_shared<asio::steady_timer>(core_.io, Clock::time_point::max());
    const auto outcome = std::make_shared<std::optional<Outcome<PreparedCall>>>();
    asio::post(core_.prepare_pool, [this, endpoint, &body, done, outcome] {
      Outcome<PreparedCall> made = prepare_or_error(endpoint, body);
      asio::post(core_.io, [done, outcome, made = std::move(made)]() mutable {
        outcome->emplace(std::move(made));
        done->cancel();
      });
    });
    error_code ec;
    while (!outcome->has_value()) co_await done->async_wait(redirect_error(use_awaitable, ec));
    co_return std::move(**outcome);
  }

  Outcome<PreparedCall> prepare_or_error(Endpoint endpoint, const std::string& body) const {
    try {
      return core_.service.prepare(endpoint, body);
    } catch (const std::bad_alloc&) {
      return error_from_status(resource_exhausted("out of memory while reading the request; send a smaller one"));
    } catch (const std::exception& e) {
      return error_from_status(internal_error(std::string("unexpected exception while reading the request: ") + e.what()));
    }
  }

  awaitable<bool> generate(Endpoint endpoint, const std::string& body, bool keep_alive) {
    const auto count_down = [this](void*) { --core_.n_calls; };
    const std::unique_ptr<void, decltype(count_down)> counted(&++core_.n_calls, count_down);
    Outcome<PreparedCall> prepared = co_await prepare(endpoint, body);
    if (const auto* error = std::get_if<ApiError>(&prepared)) co_return co_await send(error_reply(*error), keep_alive);
    PreparedCall& call = std::get<PreparedCall>(prepared);
    record_.is_generation = true;
    record_.stream = call.stream;
    record_.seed = call.head.seed;
    record_.generation.n_prompt = static_cast<int64_t>(call.generation.prompt_ids.size());

    const auto outbox = std::make_shared<Outbox>(core_.io);
    const auto job = make_job(std::move(call.generation), core_.io, outbox);
    const auto submitted = Clock::now();
    if (core_.draining) co_return co_await send(error_reply(shutting_down()), false);
    if (const auto refused = core_.worker.submit(job)) co_return co_await send(error_reply(*refused), keep_alive);
    watch(job, outbox);

    bool head_sent = false;
    while (!outbox->client_gone && !(outbox->result && outbox->deltas.empty())) {
      const bool timed_out = co_await wait_for_text(*outbox);
      if (outbox->client_gone) break;
      const std::vector<ReplyDelta> deltas = std::exchange(outbox->deltas, {});
      if (!call.stream || (deltas.empty() && !timed_out)) continue;
      std::string text;
      if (!head_sent) text = stream_head(minor_, keep_alive && minor_ == 1, record_.id, core_.server_name);
      std::string events = head_sent ? "" : opening_event(call.head);
      for (const ReplyDelta& delta : deltas) events += delta_events(call.head, delta);
      if (deltas.empty()) events += kKeepAliveEvent;
      text += stream_piece(minor_, events);
      head_sent = true;
      const bool written = co_await write(std::move(text));
      if (!written) outbox->client_gone = true;
    }
    if (outbox->client_gone) job->cancelled = true;
    error_code ec;
    while (!outbox->result) {  // a cancelled job ends within a token of its turn
      outbox->wake.expires_at(Clock::time_point::max());
      co_await outbox->wake.async_wait(redirect_error(use_awaitable, ec));
    }
    outbox->closed = true;
    stream_.socket().cancel(ec);

    if (outbox->started) record_.queue_seconds = std::chrono::duration<double>(*outbox->started - submitted).count();
    if (outbox->first_text) record_.first_text_seconds = std::chrono::duration<double>(*outbox->first_text - start_).count();
    Result<Generation>& result = *outbox->result;
    if (result.ok()) record_.generation = *result;
    if (outbox->client_gone) {
      finish_record(499);
      co_return false;
    }
    const bool is_cancelled = result.ok() && result->finish_reason == FinishReason::kCancelled;
    std::optional<ApiError> error;
    if (is_cancelled || !result.ok()) error = is_cancelled ? shutting_down() : error_from_status(result.error());
    if (!call.stream || (error && !head_sent)) {
      HttpReply reply = error ? error_reply(*error) : HttpReply{.body = reply_body(call.head, *result)};
      co_return co_await send(std::move(reply), keep_alive);
    }
    keep_alive = keep_alive && minor_ == 1;
    std::string text;
    if (!head_sent) {
      text = stream_head(minor_, keep_alive, record_.id, core_.server_name) + stream_piece(minor_, opening_event(call.head));
    }
    text += stream_piece(minor_, error ? error_events(*error) : closing_events(call.head, *result)) + stream_end(minor_);
    const bool written = co_await write(std::move(text));
    finish_record(written ? (error ? error->status : 200) : 499);
    co_return written && keep_alive && !core_.draining;
  }

  // Returns when there is something to do; true when nothing came for keepalive_seconds.
  awaitable<bool> wait_for_text(Outbox& outbox) {
    if (outbox.is_ready()) co_return false;
    error_code ec;
    outbox.wake.expires_after(duration_of(core_.options.keepalive_seconds));
    co_await outbox.wake.async_wait(redirect_error(use_awaitable, ec));
    co_return !ec && !outbox.is_ready();
  }

  // Notices a closed peer while the model computes. Bytes of a next request are read ahead, up to a limit.
  void watch(const std::shared_ptr<Job>& job, const std::shared_ptr<Outbox>& outbox) {
    stream_.socket().async_wait(tcp::socket::wait_read, [self = shared_from_this(), job, outbox](error_code ec) {
      if (ec || outbox->closed || self->buffer_.size() >= kReadAheadBytes) return;
      self->stream_.socket().non_blocking(true, ec);
      const size_t n = self->stream_.socket().read_some(self->buffer_.prepare(4096), ec);
      self->buffer_.commit(n);
      if (!ec || ec == asio::error::would_block) return self->watch(job, outbox);
      outbox->client_gone = true;
      job->cancelled = true;
      outbox->wake.cancel();
    });
  }

  // Ends our side and drops what the client still sends for a moment; closing at once could destroy the reply on its way.
  awaitable<void> linger() {
    error_code ec;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ec);
    if (ec) co_return;
    std::vector<char> scratch(64 << 10);
    stream_.expires_after(duration_of(kLingerSeconds));
    for (uint64_t total = 0; !ec && total < kLingerBytes;) {
      total += co_await stream_.async_read_some(asio::buffer(scratch), redirect_error(use_awaitable, ec));
    }
  }

  Core& core_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  Clock::time_point start_;
  RequestRecord record_;
  int minor_ = 1;
  bool is_idle_ = false;
};

awaitable<void> serve_connection(std::shared_ptr<Connection> connection) {
  try {
    co_await connection->run();
  } catch (const std::exception&) {  // out of memory on one connection: drop it, keep the others
    connection->close();
  }
}

awaitable<void> accept_all(Core& core, tcp::acceptor& acceptor) {
  asio::steady_timer pause(core.io);
  while (acceptor.is_open()) {
    error_code ec;
    tcp::socket socket = co_await acceptor.async_accept(redirect_error(use_awaitable, ec));
    if (!acceptor.is_open()) break;
    if (ec) {  // for example out of file descriptors: give connections time to end
      pause.expires_after(std::chrono::milliseconds(100));
      co_await pause.async_wait(redirect_error(use_awaitable, ec));
      continue;
    }
    if (static_cast<int>(core.connections.size()) >= core.options.max_connections) {
      socket.non_blocking(true, ec);
      const std::string_view refusal = "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n";
      socket.write_some(asio::buffer(refusal), ec);
      continue;
    }
    socket.set_option(tcp::no_delay(true), ec);
    asio::co_spawn(core.io, serve_connection(std::make_shared<Connection>(core, std::move(socket))), asio::detached);
  }
}

// Watches for the stop, then winds everything down.
awaitable<void> supervise(Core& core, tcp::acceptor& acceptor, const std::function<bool()>& should_stop) {
  asio::steady_timer tick(core.io);
  error_code ec;
  while (!should_stop()) {
    tick.expires_after(std::chrono::milliseconds(100));
    co_await tick.async_wait(redirect_error(use_awaitable, ec));
  }
  core.draining = true;
  core.service.start_draining();
  for (Connection* connection : core.connections) {
    if (connection->is_idle()) connection->close();
  }
  // New connections are still answered (with 503) while calls are finishing.
  auto begin = Clock::now();
  for (bool is_cancelled = false; core.n_calls > 0;) {
    if (seconds_since(begin) >= core.options.drain_seconds && !std::exchange(is_cancelled, true)) core.worker.cancel_all();
    if (seconds_since(begin) >= core.options.drain_seconds + kForceCloseSeconds) break;
    tick.expires_after(std::chrono::milliseconds(20));
    co_await tick.async_wait(redirect_error(use_awaitable, ec));
  }
  acceptor.close(ec);
  begin = Clock::now();
  while (!core.connections.empty()) {
    for (Connection* connection : core.connections) {
      if (connection->is_idle() || seconds_since(begin) >= kLingerSeconds) connection->close();
    }
    tick.expires_after(std::chrono::milliseconds(20));
    co_await tick.async_wait(redirect_error(use_awaitable, ec));
  }
}

}  // namespace

struct Server::Impl {
  Impl(Service& service, TextGenerator& generator, const ServerOptions& options, RequestLog log)
      : core(service, generator, options, std::move(log)), acceptor(core.io) {}

  Core core;
  tcp::acceptor acceptor;
  std::string address;  // as bound
  int port = 0;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;
Result<std::unique_ptr<Server>> Server::open(Service& service, TextGenerator& generator, const ServerOptions& options,
                                             RequestLog log) {
  if (options.port < 0 || options.port > 65535) {
    return invalid_argument("serve: port: expected 0 to 65535, found " + std::to_string(options.port));
  }
  auto impl = std::make_unique<Impl>(service, generator, options, std::move(log));
  error_code ec;
  tcp::resolver resolver(impl->core.io);
  const auto found = resolver.resolve(options.host, std::to_string(options.port), tcp::resolver::passive, ec);
  if (ec || found.empty()) {
    return invalid_argument("serve: host '" + options.host + "': expected an address of this machine: " + ec.message());
  }
  const tcp::endpoint endpoint = found.begin()->endpoint();
  impl->acceptor.open(endpoint.protocol(), ec);
  if (!ec) impl->acceptor.set_option(tcp::acceptor::reuse_address(true), ec);
  if (!ec) impl->acceptor.bind(endpoint, ec);
  if (!ec) impl->acceptor.listen(tcp::acceptor::max_listen_connections, ec);
  if (ec) {
    return unavailable("serve: cannot listen on " + options.host + " port " + std::to_string(options.port) + ": " +
                       ec.message() + "; use another --port (0 picks a free one)");
  }
  impl->address = endpoint.address().to_string();
  impl->port = impl->acceptor.local_endpoint(ec).port();
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

int Server::port() const { return impl_->port; }
std::string Server::url() const {
  const bool is_v6 = impl_->address.find(':') != std::string::npos;
  return "http://" + (is_v6 ? "[" + impl_->address + "]" : impl_->address) + ":" + std::to_string(impl_->port);
}

Status Server::run(const std::function<bool()>& should_stop) {
  Core& core = impl_->core;
  asio::co_spawn(core.io, accept_all(core, impl_->acceptor), asio::detached);
  asio::co_spawn(core.io, supervise(core, impl_->acceptor, should_stop), asio::detached);
  try {
    core.io.run();
  } catch (const std::exception& e) {
    return internal_error(std::string("serve: ") + e.what());
  }
  return ok_status();
}

}  // namespace espalier
