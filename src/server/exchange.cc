#include "server/exchange.h"

#include <cctype>
#include <nlohmann/json.hpp>

#include "server/log.h"
#include "server/wire.h"

namespace k3 {
namespace {

// A client's own id is taken over when it can stand in a header and a log line as it is.
bool good_request_id(const std::string& id) {
  if (id.empty() || id.size() > 128) return false;
  for (char c : id) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 &&
        std::string_view("-_.:").find(c) == std::string_view::npos) {
      return false;
    }
  }
  return true;
}

}  // namespace

Exchange::Exchange(HttpRequest http_request, std::shared_ptr<Responder> responder,
                   std::shared_ptr<Metrics> metrics, std::string route, Headers always)
    : request_(std::move(http_request)),
      responder_(std::move(responder)),
      metrics_(std::move(metrics)),
      route_(std::move(route)),
      always_(std::move(always)) {
  const std::string* given = request_.header("x-request-id");
  request_id_ = given != nullptr && good_request_id(*given) ? *given : random_id("req-");
  always_.emplace_back("X-Request-Id", request_id_);
}

HttpReply Exchange::prepared(HttpReply reply) const {
  reply.headers.insert(reply.headers.end(), always_.begin(), always_.end());
  const std::string& m = request_.method;
  const bool known = m == "GET" || m == "POST" || m == "HEAD" || m == "OPTIONS";
  metrics_->count_http(known ? m : "other", route_, reply.status);
  return reply;
}

void Exchange::reply(HttpReply reply) { responder_->send(prepared(std::move(reply))); }

void Exchange::reply_json(int status, const nlohmann::ordered_json& body) {
  HttpReply out;
  out.status = status;
  out.body = dump_json(body);
  reply(std::move(out));
}

void Exchange::reply_error(const ApiError& error) {
  // Not the message: it may show what the client sent.
  server_log().info("request {} {} {} status={} code={} param={}", request_id_, request_.method,
                    route_, error.http_status, error.code, error.param);
  HttpReply out;
  out.status = error.http_status;
  out.body = error_body(error);
  if (error.http_status == 401) out.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.http_status == 503) out.headers.emplace_back("Retry-After", "2");
  reply(std::move(out));
}

void Exchange::begin_events() {
  HttpReply head;
  head.content_type = "text/event-stream; charset=utf-8";
  head.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  responder_->begin(prepared(std::move(head)));
}

}  // namespace k3
