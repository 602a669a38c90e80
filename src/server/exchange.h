// One HTTP request and the way to answer it: adds the headers every answer carries (X-Request-Id,
// CORS), counts it, says errors as OpenAI does.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "server/api_error.h"
#include "server/http_server.h"
#include "server/metrics.h"

namespace k3 {

class Exchange {
 public:
  // `route` labels the metric; it must come from a fixed set.
  Exchange(HttpRequest http_request, std::shared_ptr<Responder> responder,
           std::shared_ptr<Metrics> metrics, std::string route, Headers always);

  const HttpRequest& request() const { return request_; }
  const std::string& request_id() const { return request_id_; }
  void drop_body() { std::string().swap(request_.body); }

  void reply(HttpReply reply);
  void reply_json(int status, const nlohmann::ordered_json& body);
  // 401 gets WWW-Authenticate, 503 Retry-After.
  void reply_error(const ApiError& error);

  void begin_events();  // 200, text/event-stream
  bool write(std::string data) { return responder_->write(std::move(data)); }
  void end() { responder_->end(); }
  void on_disconnect(std::function<void(bool slow)> gone) {
    responder_->on_disconnect(std::move(gone));
  }

 private:
  HttpReply prepared(HttpReply reply) const;

  HttpRequest request_;
  std::shared_ptr<Responder> responder_;
  std::shared_ptr<Metrics> metrics_;
  std::string route_;
  Headers always_;
  std::string request_id_;
};

}  // namespace k3
