// HTTP/1.1 on sockets: keep-alive, limits, deadlines, disconnects and back-pressure. It knows no
// endpoints: a request goes to one handler with a Responder, which any thread may use. Boost
// appears only in http_server.cc. TLS is out of scope: put a proxy in front (docs/serving.md#tls).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace k3 {

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;  // 0 = any free port
  int io_threads = 2;
  size_t max_connections = 16384;      // more are closed at once
  size_t max_header_bytes = 16 << 10;  // beyond: 431
  size_t max_body_bytes = 32 << 20;    // beyond: 413
  size_t max_pending_bytes = 1 << 20;  // unsent bytes of a stream; beyond: the client is dropped
  double idle_seconds = 75;            // a connection without a request
  double header_seconds = 15;          // first byte to last byte of a header
  double body_seconds = 120;           // header to last byte of the body
  double write_seconds = 30;           // without the client taking a byte
};

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;
  std::string path;  // percent-decoded, without the query
  Headers headers;   // names in lower case
  std::string body;
  const std::string* header(const std::string& name) const;  // lower case; null if absent
};

struct HttpReply {
  int status = 200;
  Headers headers;
  std::string content_type = "application/json";
  std::string body;
};

// One answer, given once: send(), or begin() then write()... then end(). Thread-safe. Dropped
// without an answer, it answers 500.
class Responder {
 public:
  virtual ~Responder() = default;
  virtual void send(HttpReply reply) = 0;
  // Starts a stream: status and headers, chunked.
  virtual void begin(HttpReply head) = 0;
  // False when the connection is gone, or was just closed because the client is too far behind.
  virtual bool write(std::string data) = 0;
  virtual void end() = 0;
  // `gone(slow)` runs once, on an IO thread, if the connection ends before the answer does; at once
  // if it has already. slow: because the client did not read.
  virtual void on_disconnect(std::function<void(bool slow)> gone) = 0;
};

class HttpServer {
 public:
  // Runs on an IO thread and must be quick; longer work goes elsewhere and keeps the Responder.
  using Handler = std::function<void(HttpRequest request, std::shared_ptr<Responder> responder)>;
  // What to answer when HTTP itself is wrong (400, 408, 413, 431).
  using ErrorReply = std::function<HttpReply(int status, const std::string& message)>;

  HttpServer(HttpOptions options, Handler handler, ErrorReply error_reply);
  ~HttpServer();  // stop(0)

  // Binds and starts the threads. kInvalidArgument for an address it cannot parse or resolve,
  // kUnavailable for a port in use.
  Status start();
  uint16_t port() const;
  int64_t connections() const;

  // Takes no new connections and closes idle ones; answers in progress say `Connection: close`.
  void close_listener();
  // close_listener, waits up to `seconds` for answers in progress to be written, then closes the
  // rest and joins the threads.
  void stop(double seconds);

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace k3
