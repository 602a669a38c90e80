#include "server/http_server.h"

#include <sys/resource.h>

#include <atomic>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_set>

namespace k3 {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;
using Clock = std::chrono::steady_clock;
using ErrorCodeT = boost::system::error_code;

constexpr size_t kReadAhead = 64 << 10;  // bytes of later requests kept while one is answered
constexpr double kLingerSeconds = 2;

Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string http_date() {
  const std::time_t now = std::time(nullptr);
  std::tm tm{};
  gmtime_r(&now, &tm);
  char text[40];
  std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &tm);
  return text;
}

std::string percent_decode(std::string_view in) {
  auto hex = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  };
  std::string out;
  for (size_t i = 0; i < in.size(); ++i) {
    if (in[i] == '%' && i + 2 < in.size() && hex(in[i + 1]) >= 0 && hex(in[i + 2]) >= 0) {
      out += static_cast<char>(hex(in[i + 1]) * 16 + hex(in[i + 2]));
      i += 2;
    } else {
      out += in[i];
    }
  }
  return out;
}

// Of a target in origin form (/path?query) or in absolute form (http://host/path?query).
std::string path_of(std::string_view target) {
  if (target.starts_with("http://") || target.starts_with("https://")) {
    const size_t host = target.find("//") + 2;
    target = target.substr(std::min(target.size(), target.find_first_of("/?", host)));
    if (target.empty() || target[0] == '?') return "/";
  }
  return percent_decode(target.substr(0, target.find('?')));
}

class Connection;

}  // namespace

struct HttpServer::Impl : std::enable_shared_from_this<HttpServer::Impl> {
  Impl(HttpOptions o, Handler h, ErrorReply e)
      : options(std::move(o)), handler(std::move(h)), error_reply(std::move(e)) {}

  void accept();
  void add(const std::shared_ptr<Connection>& connection);
  void remove(Connection* connection);
  std::vector<std::shared_ptr<Connection>> live();

  const HttpOptions options;
  const Handler handler;
  const ErrorReply error_reply;
  asio::io_context io;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::optional<tcp::acceptor> acceptor;
  std::optional<asio::steady_timer> accept_pause;
  std::vector<std::thread> threads;
  uint16_t bound_port = 0;
  std::atomic<bool> closing{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::unordered_set<Connection*> connections;
};

namespace {

using Executor = asio::strand<asio::io_context::executor_type>;
using Socket = asio::basic_stream_socket<tcp, Executor>;

// A connection's life: idle -> reading a header -> reading a body -> answering -> idle ... ->
// closed. Everything but the byte counter runs on the strand. One read is outstanding nearly
// always: while idle it brings the next request, while answering it is how a client's disappearance
// is noticed.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<HttpServer::Impl> server, Socket socket)
      : server_(std::move(server)),
        socket_(std::move(socket)),
        timer_(socket_.get_executor()),
        buffer_(server_->options.max_header_bytes + kReadAhead + (64 << 10)) {}
  ~Connection() { server_->remove(this); }

  void start() {
    asio::post(socket_.get_executor(), [self = shared_from_this()] {
      ErrorCodeT ignored;
      self->socket_.set_option(tcp::no_delay(true), ignored);
      self->become_idle();
    });
  }

  // From any thread.
  void shut_down_if_idle() {
    asio::post(socket_.get_executor(), [self = shared_from_this()] {
      if (self->state_ == State::kIdle) self->close(false);
    });
  }
  void abort() {
    asio::post(socket_.get_executor(), [self = shared_from_this()] { self->close(false); });
  }

 private:
  friend class ResponderImpl;
  enum class State { kIdle, kHeader, kBody, kAnswering, kLinger, kClosed };

  // --- reading ---

  void become_idle() {
    state_ = State::kIdle;
    if (server_->closing && buffer_.size() == 0) return close(false);
    if (buffer_.size() > 0) {
      // A pipelined request is waiting. The read that was watching must end before the parser
      // reads.
      if (!watching_) return read_header();
      ErrorCodeT ignored;
      socket_.cancel(ignored);
      return;
    }
    read_deadline_ = after(server_->options.idle_seconds);
    arm();
    watch();
  }

  void watch() {
    if (watching_ || state_ == State::kClosed || buffer_.size() >= kReadAhead) return;
    watching_ = true;
    socket_.async_read_some(buffer_.prepare(4096),
                            [self = shared_from_this()](ErrorCodeT error, size_t bytes) {
                              self->watched(error, bytes);
                            });
  }

  void watched(ErrorCodeT error, size_t bytes) {
    watching_ = false;
    if (state_ == State::kClosed) return;
    if (error == asio::error::operation_aborted && state_ == State::kIdle && buffer_.size() > 0) {
      return read_header();
    }
    if (error) return close(false);
    if (state_ ==
        State::kLinger) {  // whatever still comes is thrown away until the client hangs up
      linger_bytes_ += bytes;
      if (linger_bytes_ > (size_t{64} << 20)) return close(false);
      return watch();
    }
    buffer_.commit(bytes);
    if (state_ == State::kIdle) return read_header();
    watch();
  }

  void read_header() {
    state_ = State::kHeader;
    parser_.emplace();
    parser_->header_limit(static_cast<uint32_t>(server_->options.max_header_bytes));
    parser_->body_limit(server_->options.max_body_bytes);
    read_deadline_ = after(server_->options.header_seconds);
    arm();
    http::async_read_header(
        socket_, buffer_, *parser_,
        [self = shared_from_this()](ErrorCodeT error, size_t) { self->got_header(error); });
  }

  void got_header(ErrorCodeT error) {
    if (state_ != State::kHeader) return;
    if (error) return bad_request(error);
    // A body in a coding that we do not read would be taken for none, and its bytes for the next
    // request: whoever stands in front of us would disagree about where requests begin.
    const auto codings = parser_->get().equal_range(http::field::transfer_encoding);
    for (auto field = codings.first; field != codings.second; ++field) {
      if (!beast::iequals(field->value(), "chunked") ||
          parser_->get().count(http::field::transfer_encoding) > 1) {
        return reject(400,
                      cat("Transfer-Encoding: found '", std::string(field->value()).substr(0, 40),
                          "', expected chunked, once"));
      }
    }
    // Of two, someone in front of us may have read the other.
    for (const char* name : {"Host", "Content-Type", "Content-Encoding", "Authorization",
                             "X-Request-Id", "X-data-parallel-rank"}) {
      const auto found = parser_->get().count(name);
      const bool missing = found == 0 && parser_->get().version() >= 11 && name[0] == 'H';
      if (found > 1 || missing) {
        return reject(400, cat(name, ": found ", found, " such headers, expected one"));
      }
    }
    state_ = State::kBody;
    read_deadline_ = after(server_->options.body_seconds);
    arm();
    const auto expect = parser_->get()[http::field::expect];
    if (!parser_->is_done() && beast::iequals(expect, "100-continue")) {
      push("HTTP/1.1 100 Continue\r\n\r\n");
    }
    http::async_read(socket_, buffer_, *parser_,
                     [self = shared_from_this()](ErrorCodeT e, size_t) { self->got_body(e); });
  }

  void got_body(ErrorCodeT error);

  void bad_request(ErrorCodeT error) {
    if (error == http::error::end_of_stream || error == http::error::partial_message ||
        error.category() != http::make_error_code(http::error::bad_method).category()) {
      return close(false);  // the client left, or the socket broke
    }
    int status = 400;
    std::string message = cat("malformed HTTP request: ", error.message());
    if (error == http::error::header_limit || error == http::error::buffer_overflow) {
      status = 431;
      message = cat("the request's header is beyond ", server_->options.max_header_bytes, " bytes");
    } else if (error == http::error::body_limit) {
      status = 413;
      message = cat("the request's body is beyond ", server_->options.max_body_bytes, " bytes");
    }
    reject(status, message);
  }

  void reject(int status, const std::string& message) {
    state_ = State::kAnswering;
    read_deadline_ = Clock::time_point::max();
    keep_alive_ = false;
    head_only_ = false;
    version_ = 11;
    send_whole(server_->error_reply(status, message));
  }

  // --- deadlines ---

  void arm() {
    const auto next = std::min(read_deadline_, write_deadline_);
    if (next == Clock::time_point::max() || (timer_set_ && timer_at_ <= next)) return;
    timer_set_ = true;
    timer_at_ = next;
    timer_.expires_at(next);
    timer_.async_wait([weak = weak_from_this()](ErrorCodeT error) {
      if (auto self = weak.lock(); self && !error) self->expired();
    });
  }

  void expired() {
    timer_set_ = false;
    if (state_ == State::kClosed) return;
    const auto now = Clock::now();
    if (write_deadline_ <= now) return close(true);
    if (read_deadline_ <= now) {
      if (state_ == State::kHeader || state_ == State::kBody) {
        linger_ = false;  // a read is pending; closing the socket ends it
        return reject(408, "the request did not arrive in time");
      }
      return close(false);
    }
    arm();
  }

  // --- writing ---

  void push(std::string data) {
    if (state_ == State::kClosed || data.empty()) return;
    pending_bytes_ += data.size();
    queue_.push_back(std::move(data));
    if (!writing_) write_some();
  }

  void write_some() {
    writing_ = true;
    write_deadline_ = after(server_->options.write_seconds);
    arm();
    std::vector<asio::const_buffer> buffers;
    size_t skip = front_sent_;
    for (const std::string& data : queue_) {
      buffers.emplace_back(data.data() + skip, data.size() - skip);
      skip = 0;
      if (buffers.size() == 16) break;
    }
    socket_.async_write_some(buffers, [self = shared_from_this()](ErrorCodeT error, size_t bytes) {
      self->wrote(error, bytes);
    });
  }

  void wrote(ErrorCodeT error, size_t bytes) {
    writing_ = false;
    write_deadline_ = Clock::time_point::max();
    if (state_ == State::kClosed) return;
    if (error) return close(false);
    pending_bytes_ -= bytes;
    front_sent_ += bytes;
    while (!queue_.empty() && front_sent_ >= queue_.front().size()) {
      front_sent_ -= queue_.front().size();
      queue_.pop_front();
    }
    if (!queue_.empty()) return write_some();
    if (state_ == State::kAnswering && answer_done_) finish_answer();
  }

  void send_whole(const HttpReply& reply) {
    std::string out = head_of(reply);
    out += cat("Content-Length: ", reply.body.size(), "\r\n\r\n");
    if (!head_only_) out += reply.body;
    answer_done_ = true;
    push(std::move(out));
  }

  void begin_stream(const HttpReply& reply) {
    chunked_ = version_ >= 11;
    if (!chunked_) keep_alive_ = false;
    std::string out = head_of(reply);
    if (chunked_) out += "Transfer-Encoding: chunked\r\n";
    push(out + "\r\n");
  }

  void stream(const std::string& data) {
    if (head_only_) return;
    if (!chunked_) return push(data);
    char size[32];
    std::snprintf(size, sizeof size, "%zx\r\n", data.size());
    push(size + data + "\r\n");
  }

  void end_stream() {
    if (state_ == State::kClosed) return;
    answer_done_ = true;
    if (chunked_ && !head_only_) return push("0\r\n\r\n");
    if (!writing_ && queue_.empty()) finish_answer();
  }

  std::string head_of(const HttpReply& reply) {
    if (server_->closing) keep_alive_ = false;
    std::string out =
        cat("HTTP/1.1 ", reply.status, " ",
            http::obsolete_reason(static_cast<http::status>(reply.status)),
            "\r\nDate: ", http_date(), "\r\nContent-Type: ", reply.content_type, "\r\n");
    for (const auto& [name, value] : reply.headers) out += cat(name, ": ", value, "\r\n");
    if (!keep_alive_) {
      out += "Connection: close\r\n";
    } else if (version_ < 11) {
      out += "Connection: keep-alive\r\n";
    }
    return out;
  }

  void finish_answer() {
    answer_done_ = false;
    on_gone_ = nullptr;
    ++serial_;
    if (keep_alive_ && !(server_->closing && buffer_.size() == 0)) return become_idle();
    if (!linger_) return close(false);
    // Close in two steps, so that a client still sending reads the answer instead of a reset.
    ErrorCodeT ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    state_ = State::kLinger;
    buffer_.clear();
    read_deadline_ = after(kLingerSeconds);
    arm();
    watch();
  }

  void close(bool slow) {
    if (state_ == State::kClosed) return;
    state_ = State::kClosed;
    gone_slow_ = slow;
    timer_.cancel();
    ErrorCodeT ignored;
    socket_.close(ignored);
    queue_.clear();
    ++serial_;
    if (auto gone = std::exchange(on_gone_, nullptr)) gone(slow);
    server_->remove(this);
  }

  const std::shared_ptr<HttpServer::Impl> server_;
  Socket socket_;
  asio::steady_timer timer_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  State state_ = State::kIdle;
  bool watching_ = false, writing_ = false, timer_set_ = false;
  bool keep_alive_ = true, head_only_ = false, chunked_ = false, answer_done_ = false;
  bool linger_ = true, gone_slow_ = false;
  unsigned version_ = 11;
  uint64_t serial_ = 0;  // of the request being answered; a late Responder is told by it
  size_t linger_bytes_ = 0;
  Clock::time_point read_deadline_ = Clock::time_point::max();
  Clock::time_point write_deadline_ = Clock::time_point::max();
  Clock::time_point timer_at_;
  std::deque<std::string> queue_;
  size_t front_sent_ = 0;
  std::atomic<size_t> pending_bytes_{0};  // queued and not yet taken by the kernel
  std::atomic<size_t> posted_bytes_{0};   // on their way to the strand
  std::function<void(bool)> on_gone_;
};

class ResponderImpl : public Responder {
 public:
  ResponderImpl(std::shared_ptr<Connection> c, uint64_t serial)
      : connection_(std::move(c)), serial_(serial) {}

  ~ResponderImpl() override {
    if (!answered_) {
      HttpReply reply = connection_->server_->error_reply(500, "the request was dropped");
      ResponderImpl::send(std::move(reply));
    }
  }

  void send(HttpReply reply) override {
    answered_ = true;
    on_strand([reply = std::move(reply)](Connection* c) { c->send_whole(reply); });
  }

  void begin(HttpReply head) override {
    answered_ = true;
    on_strand([head = std::move(head)](Connection* c) { c->begin_stream(head); });
  }

  bool write(std::string data) override {
    if (gone_.load()) return false;
    Connection* c = connection_.get();
    if (c->pending_bytes_ + c->posted_bytes_ + data.size() >
        c->server_->options.max_pending_bytes) {
      gone_ = true;
      on_strand([](Connection* slow) { slow->close(true); });
      return false;
    }
    const size_t size = data.size();
    c->posted_bytes_ += size;
    asio::post(c->socket_.get_executor(),
               [c = connection_, serial = serial_, data = std::move(data), size] {
                 c->posted_bytes_ -= size;
                 if (c->serial_ == serial) c->stream(data);
               });
    return true;
  }

  void end() override {
    on_strand([](Connection* c) { c->end_stream(); });
  }

  void on_disconnect(std::function<void(bool)> gone) override {
    asio::post(connection_->socket_.get_executor(),
               [c = connection_, serial = serial_, gone = std::move(gone)]() mutable {
                 if (c->serial_ == serial) {
                   c->on_gone_ = std::move(gone);
                 } else if (c->state_ == Connection::State::kClosed) {
                   gone(c->gone_slow_);
                 }
               });
  }

 private:
  template <typename F>
  void on_strand(F f) {
    asio::post(connection_->socket_.get_executor(),
               [c = connection_, serial = serial_, f = std::move(f)] {
                 if (c->serial_ == serial) f(c.get());
               });
  }

  const std::shared_ptr<Connection> connection_;
  const uint64_t serial_;
  std::atomic<bool> gone_{false};
  std::atomic<bool> answered_{false};
};

void Connection::got_body(ErrorCodeT error) {
  if (state_ != State::kBody) return;
  if (error) return bad_request(error);
  state_ = State::kAnswering;
  read_deadline_ = Clock::time_point::max();
  auto message = parser_->release();
  keep_alive_ = message.keep_alive();
  version_ = message.version();
  head_only_ = message.method() == http::verb::head;
  chunked_ = answer_done_ = false;
  HttpRequest request;
  request.method = std::string(message.method_string());
  request.path = path_of({message.target().data(), message.target().size()});
  for (const auto& field : message) {
    std::string name(field.name_string());
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    request.headers.emplace_back(std::move(name), std::string(field.value()));
  }
  request.body = std::move(message.body());
  parser_.reset();
  watch();
  server_->handler(std::move(request),
                   std::make_shared<ResponderImpl>(shared_from_this(), serial_));
}

}  // namespace

void HttpServer::Impl::accept() {
  auto socket = std::make_shared<Socket>(asio::make_strand(io));
  acceptor->async_accept(*socket, [self = shared_from_this(), socket](ErrorCodeT error) {
    if (self->closing) return;
    if (!error) {
      self->add(std::make_shared<Connection>(self, std::move(*socket)));
      return self->accept();
    }
    // Out of file descriptors, most likely: let some close before trying again.
    self->accept_pause->expires_after(std::chrono::milliseconds(100));
    self->accept_pause->async_wait([self](ErrorCodeT e) {
      if (!e && !self->closing) self->accept();
    });
  });
}

void HttpServer::Impl::add(const std::shared_ptr<Connection>& connection) {
  {
    std::lock_guard lock(mutex);
    if (connections.size() >= options.max_connections) return;  // dropped, and so closed
    connections.insert(connection.get());
  }
  connection->start();
}

void HttpServer::Impl::remove(Connection* connection) {
  std::lock_guard lock(mutex);
  connections.erase(connection);
  changed.notify_all();
}

std::vector<std::shared_ptr<Connection>> HttpServer::Impl::live() {
  std::vector<std::shared_ptr<Connection>> out;
  std::lock_guard lock(mutex);
  for (Connection* c : connections) {
    if (auto strong = c->weak_from_this().lock()) out.push_back(std::move(strong));
  }
  return out;
}

const std::string* HttpRequest::header(const std::string& name) const {
  for (const auto& [n, value] : headers) {
    if (n == name) return &value;
  }
  return nullptr;
}

HttpServer::HttpServer(HttpOptions options, Handler handler, ErrorReply error_reply)
    : impl_(
          std::make_shared<Impl>(std::move(options), std::move(handler), std::move(error_reply))) {}

HttpServer::~HttpServer() { stop(0); }

Status HttpServer::start() {
  // A stream is a file descriptor; the usual soft limit of 1024 is not what the operator meant.
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  const HttpOptions& o = impl_->options;
  ErrorCodeT error;
  tcp::resolver resolver(impl_->io);
  const auto found =
      resolver.resolve(o.host, std::to_string(o.port), tcp::resolver::passive, error);
  if (error || found.empty()) {
    return invalid_argument("--host ", o.host, ": not an address of this machine (",
                            error.message(), ")");
  }
  const tcp::endpoint endpoint = *found.begin();
  impl_->acceptor.emplace(impl_->io);
  impl_->acceptor->open(endpoint.protocol(), error);
  if (!error) impl_->acceptor->set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) impl_->acceptor->bind(endpoint, error);
  if (!error) impl_->acceptor->listen(4096, error);
  if (error) {
    impl_->acceptor.reset();
    return {ErrorCode::kUnavailable,
            cat("cannot listen on ", o.host, ":", o.port, ": ", error.message())};
  }
  impl_->bound_port = impl_->acceptor->local_endpoint().port();
  impl_->accept_pause.emplace(impl_->io);
  impl_->work.emplace(impl_->io.get_executor());
  impl_->accept();
  for (int i = 0; i < std::max(1, o.io_threads); ++i) {
    impl_->threads.emplace_back([impl = impl_] { impl->io.run(); });
  }
  return {};
}

uint16_t HttpServer::port() const { return impl_->bound_port; }

int64_t HttpServer::connections() const {
  std::lock_guard lock(impl_->mutex);
  return static_cast<int64_t>(impl_->connections.size());
}

void HttpServer::close_listener() {
  if (impl_->closing.exchange(true) || !impl_->acceptor) return;
  asio::post(impl_->io, [impl = impl_] {
    ErrorCodeT ignored;
    impl->acceptor->close(ignored);
    impl->accept_pause->cancel();
  });
  for (const auto& c : impl_->live()) c->shut_down_if_idle();
}

void HttpServer::stop(double seconds) {
  close_listener();
  if (impl_->threads.empty()) return;
  {
    std::unique_lock lock(impl_->mutex);
    impl_->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                            [&] { return impl_->connections.empty(); });
  }
  for (const auto& c : impl_->live()) c->abort();
  {
    std::unique_lock lock(impl_->mutex);
    impl_->changed.wait_for(lock, std::chrono::seconds(2),
                            [&] { return impl_->connections.empty(); });
  }
  impl_->work.reset();
  impl_->io.stop();
  for (std::thread& t : impl_->threads) t.join();
  impl_->threads.clear();
  // Handlers still queued hold connections, which hold this: let them run, all see a closed socket.
  impl_->io.restart();
  impl_->io.poll();
}

}  // namespace k3
