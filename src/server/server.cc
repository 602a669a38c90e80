#include "server/server.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cmath>
#include <ctime>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "server/exchange.h"
#include "server/fields.h"
#include "server/generation_job.h"
#include "server/json_body.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/schema.h"
#include "server/wire.h"
#include "server/worker_pool.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;
using ExchangePtr = std::shared_ptr<Exchange>;

constexpr const char* kModelPrefix = "/v1/models/";
constexpr int64_t kDefaultCompletionTokens = 16;  // OpenAI's
const ApiError kShutDown{503, "the request was cancelled: the server is shutting down",
                         "service_unavailable", "", "cancelled"};

// Every byte is looked at, so that time does not tell how much of a key was right.
bool same_key(const std::string& a, const std::string& b) {
  unsigned char different = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    different |= static_cast<unsigned char>(a[i] ^ (b.empty() ? 0 : b[i % b.size()]));
  }
  return different == 0;
}

std::string header_safe(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == ',' ||
        c == ' ' || c == '*') {
      out += c;
    }
  }
  return out;
}

// A Content-Type: application/json, with no charset or with UTF-8.
bool is_utf8_json(std::string type) {
  std::erase_if(type, [](char c) { return c == ' ' || c == '\t' || c == '"'; });
  for (char& c : type) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const size_t charset = type.find(";charset=");
  return type.substr(0, type.find(';')) == "application/json" &&
         (charset == std::string::npos ||
          type.substr(charset, type.find(';', charset + 1) - charset) == ";charset=utf-8");
}

bool cut_prefix(const std::string& text, std::string_view prefix, std::string* rest) {
  if (text.compare(0, prefix.size(), prefix) != 0) return false;
  *rest = text.substr(prefix.size());
  return true;
}

}  // namespace

struct Server::Impl {
  struct Route {
    const char* method;
    const char* path;
    bool guarded;        // needs an API key
    bool while_loading;  // answers without a model
    bool long_work;      // on a worker
    void (Impl::*handle)(const ExchangePtr&, const ModelContext*);
  };
  static const std::vector<Route>& routes();

  explicit Impl(ServerOptions o)
      : options(std::move(o)),
        http(
            options.http,
            [this](HttpRequest request, std::shared_ptr<Responder> responder) {
              handle(std::move(request), std::move(responder));
            },
            [this](int status, const std::string& message) {
              metrics->count_http("other", "malformed", status);
              const std::string id = random_id("req-");
              server_log().info("request {} malformed status={}", id, status);
              HttpReply reply;
              reply.status = status;
              reply.headers = {{"X-Request-Id", id}};
              reply.body = error_body({status, message,
                                       status == 500 ? "server_error" : "invalid_request_error", "",
                                       status == 413 ? "body_too_large" : "bad_http"});
              return reply;
            }) {}

  void handle(HttpRequest request, std::shared_ptr<Responder> responder);
  void run(const Route& route, const ExchangePtr& exchange,
           const std::shared_ptr<const ModelContext>& context);
  Headers cors(const HttpRequest& request) const;
  std::optional<ApiError> authorise(const HttpRequest& request) const;
  std::optional<ApiError> check_model(const std::string& asked) const;
  ApiError unready() const;
  std::shared_ptr<const ModelContext> ready() const {
    std::lock_guard lock(mutex);
    return context;
  }

  void health(const ExchangePtr& x, const ModelContext* model);
  void version(const ExchangePtr& x, const ModelContext* model);
  void metrics_page(const ExchangePtr& x, const ModelContext* model);
  void models(const ExchangePtr& x, const ModelContext* model);
  void model_by_id(const ExchangePtr& x, const ModelContext* model);
  void completions(const ExchangePtr& x, const ModelContext* model);
  void chat_completions(const ExchangePtr& x, const ModelContext* model);
  void tokenize(const ExchangePtr& x, const ModelContext* model);
  void detokenize(const ExchangePtr& x, const ModelContext* model);

  bool read_body(const ExchangePtr& x, Json* body);
  Json model_card(const std::string& id, const ModelContext& model) const;
  void generate(const ExchangePtr& x, const ModelContext& model, GenerationFields fields, bool chat,
                std::vector<GenerationSpec::Prompt> prompts, PipelineOptions pipeline);

  const ServerOptions options;
  const int64_t created = static_cast<int64_t>(std::time(nullptr));
  std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>();
  HttpServer http;
  std::unique_ptr<WorkerPool> workers;

  mutable std::mutex mutex;
  std::shared_ptr<const ModelContext> context;  // null while loading
  double progress = 0;
  std::string stage = "starting";
  std::vector<std::weak_ptr<GenerationJob>> jobs;
  std::atomic<bool> draining{false}, cut_short{false}, stopped{false};
};

const std::vector<Server::Impl::Route>& Server::Impl::routes() {
  static const std::vector<Route> all = {
      {"POST", "/v1/completions", true, false, true, &Impl::completions},
      {"POST", "/v1/chat/completions", true, false, true, &Impl::chat_completions},
      {"GET", "/v1/models", true, false, false, &Impl::models},
      {"GET", kModelPrefix, true, false, false, &Impl::model_by_id},
      {"POST", "/tokenize", true, false, true, &Impl::tokenize},
      {"POST", "/detokenize", true, false, true, &Impl::detokenize},
      {"GET", "/health", false, true, false, &Impl::health},
      {"GET", "/ping", false, true, false, &Impl::health},
      {"GET", "/version", false, false, false, &Impl::version},
      {"GET", "/metrics", false, true, false, &Impl::metrics_page},
  };
  return all;
}

void Server::Impl::handle(HttpRequest request, std::shared_ptr<Responder> responder) {
  const std::string method = request.method == "HEAD" ? "GET" : request.method;
  const Route* found = nullptr;
  std::string allowed;
  for (const Route& route : routes()) {
    const bool prefix = std::string_view(route.path) == kModelPrefix;
    std::string rest;
    if (prefix ? !(cut_prefix(request.path, route.path, &rest) && !rest.empty())
               : request.path != route.path) {
      continue;
    }
    if (method == route.method) found = &route;
    allowed += std::string(allowed.empty() ? "" : ", ") + route.method +
               (std::string_view(route.method) == "GET" ? ", HEAD" : "");
  }
  const std::string label = allowed.empty() ? "unknown" : found != nullptr ? found->path : "other";
  Headers always = cors(request);
  auto exchange = std::make_shared<Exchange>(std::move(request), std::move(responder), metrics,
                                             label, std::move(always));
  if (method == "OPTIONS") {
    HttpReply reply;
    reply.status = allowed.empty() ? 404 : 200;
    reply.content_type = "text/plain";
    reply.headers = {{"Allow", allowed + (allowed.empty() ? "OPTIONS" : ", OPTIONS")}};
    return exchange->reply(std::move(reply));
  }
  if (allowed.empty()) {
    return exchange->reply_error(
        {404, cat("no such endpoint: ", method, " ", exchange->request().path.substr(0, 200)),
         "invalid_request_error", "", "not_found"});
  }
  if (found == nullptr) {
    HttpReply reply;
    reply.status = 405;
    reply.headers = {{"Allow", allowed + ", OPTIONS"}};
    reply.body = error_body(
        {405, cat("method ", method.substr(0, 40), " is not allowed here, only ", allowed),
         "invalid_request_error", "", "method_not_allowed"});
    return exchange->reply(std::move(reply));
  }
  if (found->guarded) {
    if (auto error = authorise(exchange->request())) return exchange->reply_error(*error);
  }
  auto model = ready();
  if ((model == nullptr || draining) && !found->while_loading) {
    return exchange->reply_error(unready());
  }
  if (!found->long_work) return run(*found, exchange, model);
  workers->post([this, found, exchange, model] { run(*found, exchange, model); });
}

// The last line of defence: what a library throws (out of memory, above all) becomes a 500.
void Server::Impl::run(const Route& route, const ExchangePtr& exchange,
                       const std::shared_ptr<const ModelContext>& model) {
  try {
    (this->*route.handle)(exchange, model.get());
  } catch (const std::exception& e) {
    exchange->reply_error({500, cat("internal error: ", e.what()), "server_error", "", "internal"});
  }
}

Headers Server::Impl::cors(const HttpRequest& request) const {
  Headers out;
  const std::string* origin = request.header("origin");
  if (origin == nullptr) return out;
  const auto& list = options.allowed_origins;
  if (std::find(list.begin(), list.end(), "*") != list.end()) {
    out.emplace_back("Access-Control-Allow-Origin", "*");
  } else {
    out.emplace_back("Vary", "Origin");
    if (std::find(list.begin(), list.end(), *origin) == list.end()) return out;
    out.emplace_back("Access-Control-Allow-Origin", *origin);
  }
  if (request.method == "OPTIONS") {
    const std::string* asked = request.header("access-control-request-headers");
    out.emplace_back("Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS");
    out.emplace_back("Access-Control-Allow-Headers", asked != nullptr ? header_safe(*asked) : "*");
    out.emplace_back("Access-Control-Max-Age", "600");
  } else {
    out.emplace_back("Access-Control-Expose-Headers", "X-Request-Id");
  }
  return out;
}

std::optional<ApiError> Server::Impl::authorise(const HttpRequest& request) const {
  if (options.api_keys.empty()) return std::nullopt;
  const std::string* header = request.header("authorization");
  std::string token;
  if (header != nullptr &&
      (cut_prefix(*header, "Bearer ", &token) || cut_prefix(*header, "bearer ", &token))) {
    bool good = false;
    for (const std::string& key : options.api_keys) good |= same_key(token, key);
    if (good) return std::nullopt;
  }
  return ApiError{401,
                  header == nullptr ? "an API key is needed: Authorization: Bearer KEY"
                                    : "the API key is not one of this server's",
                  "authentication_error", "", "invalid_api_key"};
}

std::optional<ApiError> Server::Impl::check_model(const std::string& asked) const {
  const auto& names = options.served_model_names;
  if (asked.empty() || std::find(names.begin(), names.end(), asked) != names.end()) {
    return std::nullopt;
  }
  std::string served;
  for (const std::string& name : names) served += (served.empty() ? "" : ", ") + name;
  return ApiError{
      404, cat("the model `", asked.substr(0, 200), "` does not exist; served here: ", served),
      "invalid_request_error", "model", "model_not_found"};
}

ApiError Server::Impl::unready() const {
  if (draining) {
    return {503, "the server is shutting down", "service_unavailable", "", "draining"};
  }
  std::lock_guard lock(mutex);
  return {503,
          cat("the model is still loading (", static_cast<int>(progress * 100), "%, ", stage, ")"),
          "service_unavailable", "", "model_loading"};
}

void Server::Impl::health(const ExchangePtr& x, const ModelContext* model) {
  Json body;
  HttpReply reply;
  reply.status = 503;
  if (draining) {
    body["status"] = "draining";
  } else if (model == nullptr) {
    std::lock_guard lock(mutex);
    body["status"] = "loading";
    body["progress"] = std::round(progress * 1e4) / 1e4;
    body["stage"] = stage;
  } else if (Status status = model->engine->health(); !status.ok()) {
    body["status"] = "error";
    body["message"] = status.message();
  } else {
    body["status"] = "ok";
    reply.status = 200;
  }
  if (reply.status == 503) reply.headers = {{"Retry-After", "2"}};
  reply.body = dump_json(body);
  x->reply(std::move(reply));
}

void Server::Impl::version(const ExchangePtr& x, const ModelContext* model) {
  Json body;
  body["version"] = options.version;
  body["model"] = options.served_model_names[0];
  body["max_model_len"] = model->max_model_len;
  body["engine"] = model->description;
  x->reply_json(200, body);
}

void Server::Impl::metrics_page(const ExchangePtr& x, const ModelContext* model) {
  metrics->connections = http.connections();
  const EngineStats stats = model != nullptr ? model->engine->stats() : EngineStats{};
  HttpReply reply;
  reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
  reply.body = metrics->print(options.served_model_names[0], model != nullptr ? &stats : nullptr);
  x->reply(std::move(reply));
}

Json Server::Impl::model_card(const std::string& id, const ModelContext& model) const {
  Json card;
  card["id"] = id;
  card["object"] = "model";
  card["created"] = created;
  card["owned_by"] = "k3";
  card["root"] = options.served_model_names[0];
  card["max_model_len"] = model.max_model_len;
  return card;
}

void Server::Impl::models(const ExchangePtr& x, const ModelContext* model) {
  Json body;
  body["object"] = "list";
  body["data"] = Json::array();
  for (const auto& name : options.served_model_names)
    body["data"].push_back(model_card(name, *model));
  x->reply_json(200, body);
}

void Server::Impl::model_by_id(const ExchangePtr& x, const ModelContext* model) {
  const std::string id = x->request().path.substr(std::string_view(kModelPrefix).size());
  if (auto error = check_model(id)) return x->reply_error(*error);
  x->reply_json(200, model_card(id, *model));
}

bool Server::Impl::read_body(const ExchangePtr& x, Json* body) {
  const std::string* type = x->request().header("content-type");
  if ((type != nullptr && !is_utf8_json(*type)) ||
      x->request().header("content-encoding") != nullptr) {
    x->reply_error({415, "the body must be plain application/json in UTF-8",
                    "invalid_request_error", "", "unsupported_media_type"});
    return false;
  }
  if (auto error = parse_json_body(x->request().body, body)) {
    x->reply_error(*error);
    return false;
  }
  x->drop_body();
  return true;
}

void Server::Impl::completions(const ExchangePtr& x, const ModelContext* model) {
  Json body;
  if (!read_body(x, &body)) return;
  CompletionBody parsed;
  if (auto error = parse_completion_body(body, {model->vocab_size, model->defaults}, &parsed)) {
    return x->reply_error(*error);
  }
  if (auto error = check_model(parsed.common.model)) return x->reply_error(*error);
  std::vector<GenerationSpec::Prompt> prompts;
  for (auto& source : parsed.prompts) {
    GenerationSpec::Prompt prompt;
    if (auto* text = std::get_if<std::string>(&source)) {
      prompt.ids = model->tokenizer->encode(*text);
      if (parsed.echo) prompt.echo = std::move(*text);
    } else {
      prompt.ids = std::move(std::get<std::vector<int32_t>>(source));
      if (parsed.echo) {
        prompt.echo = model->tokenizer->decode(prompt.ids, parsed.common.skip_special_tokens);
      }
    }
    prompts.push_back(std::move(prompt));
  }
  generate(x, *model, std::move(parsed.common), false, std::move(prompts), {});
}

void Server::Impl::chat_completions(const ExchangePtr& x, const ModelContext* model) {
  Json body;
  if (!read_body(x, &body)) return;
  ChatBody parsed;
  if (auto error = parse_chat_body(body, {model->vocab_size, model->defaults}, &parsed)) {
    return x->reply_error(*error);
  }
  if (auto error = check_model(parsed.common.model)) return x->reply_error(*error);
  auto ids = render_chat(parsed.chat, *model->tokenizer);
  if (!ids.ok()) return x->reply_error(to_api_error(ids.status()));
  PipelineOptions pipeline;
  pipeline.chat = true;
  pipeline.thinking = parsed.chat.thinking;
  pipeline.return_tools = parsed.chat.tool_choice != ToolChoice::kNone;
  std::vector<GenerationSpec::Prompt> prompts(1);
  prompts[0].ids = std::move(ids).value();
  generate(x, *model, std::move(parsed.common), true, std::move(prompts), std::move(pipeline));
}

// Both endpoints from here on: the budget of every prompt, then the job.
void Server::Impl::generate(const ExchangePtr& x, const ModelContext& model,
                            GenerationFields fields, bool chat,
                            std::vector<GenerationSpec::Prompt> prompts, PipelineOptions pipeline) {
  const std::string prompt_field = chat ? "messages" : "prompt";
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto length = static_cast<int64_t>(prompts[i].ids.size());
    const int64_t room = model.max_model_len - length;
    const std::string name = prompts.size() > 1 ? cat(prompt_field, "[", i, "]") : prompt_field;
    if (room < 1) {
      return x->reply_error({400,
                             cat(name, ": the prompt has ", length, " tokens; max_model_len is ",
                                 model.max_model_len, ", which leaves no room for an answer"),
                             "invalid_request_error", name, "context_length_exceeded"});
    }
    if (fields.max_tokens && *fields.max_tokens > room) {
      return x->reply_error(
          {400,
           cat("max_tokens: ", name, " has ", length, " tokens and max_tokens is ",
               *fields.max_tokens, "; together they exceed max_model_len (", model.max_model_len,
               ")"),
           "invalid_request_error", "max_tokens", "context_length_exceeded"});
    }
    prompts[i].max_tokens =
        fields.max_tokens.value_or(chat ? room : std::min(kDefaultCompletionTokens, room));
    if (fields.sampling.min_tokens > prompts[i].max_tokens) {
      return x->reply_error(bad_field("min_tokens", "min_tokens: found ",
                                      fields.sampling.min_tokens, ", more than max_tokens (",
                                      prompts[i].max_tokens, ")"));
    }
  }
  GenerationSpec spec;
  // vLLM's header for the same choice; which ranks there are, the router knows.
  if (const std::string* pin = x->request().header("x-data-parallel-rank")) {
    int rank = -1;
    const auto [end, error] = std::from_chars(pin->data(), pin->data() + pin->size(), rank);
    if (error != std::errc() || end != pin->data() + pin->size() || rank < 0) {
      return x->reply_error(bad_field("X-data-parallel-rank", "X-data-parallel-rank: found ",
                                      shown(Json(pin->substr(0, 40))), ", expected a rank"));
    }
    spec.rank = rank;
  }
  spec.meta.id = random_id(chat ? "chatcmpl-" : "cmpl-");
  spec.meta.model = fields.model.empty() ? options.served_model_names[0] : fields.model;
  spec.meta.created = static_cast<int64_t>(std::time(nullptr));
  spec.meta.chat = chat;
  spec.prompts = std::move(prompts);
  spec.n = fields.n;
  spec.stream = fields.stream;
  spec.include_usage = fields.include_usage;
  spec.continuous_usage_stats = fields.continuous_usage_stats;
  pipeline.stop = std::move(fields.stop);
  pipeline.include_stop_str_in_output = fields.include_stop_str_in_output;
  pipeline.skip_special_tokens = fields.skip_special_tokens;
  pipeline.ignore_eos = fields.sampling.ignore_eos;
  pipeline.min_tokens = fields.sampling.min_tokens;
  pipeline.logprobs = fields.sampling.logprobs >= 0;
  spec.pipeline = std::move(pipeline);
  spec.sampling = std::move(fields.sampling);

  auto job =
      std::make_shared<GenerationJob>(model.engine, model.tokenizer, std::move(spec), x, metrics);
  {
    std::lock_guard lock(mutex);
    jobs.erase(std::remove_if(jobs.begin(), jobs.end(), [](const auto& j) { return j.expired(); }),
               jobs.end());
    jobs.push_back(job);
  }
  job->start();
  if (cut_short) job->cancel(kShutDown);
}

void Server::Impl::tokenize(const ExchangePtr& x, const ModelContext* model) {
  Json body;
  if (!read_body(x, &body)) return;
  TokenizeBody parsed;
  if (auto error = parse_tokenize_body(body, &parsed)) return x->reply_error(*error);
  if (auto error = check_model(parsed.model)) return x->reply_error(*error);
  std::vector<int32_t> ids;
  if (const auto* chat = std::get_if<ChatRequest>(&parsed.input)) {
    auto rendered = render_chat(*chat, *model->tokenizer);
    if (!rendered.ok()) return x->reply_error(to_api_error(rendered.status()));
    ids = std::move(rendered).value();
  } else {
    const auto& text = std::get<std::string>(parsed.input);
    ids = parsed.parse_special ? model->tokenizer->encode_with_special(text)
                               : model->tokenizer->encode(text);
  }
  Json out;
  out["count"] = ids.size();
  out["max_model_len"] = model->max_model_len;
  out["tokens"] = ids;
  if (parsed.return_token_strs) {
    Json& strings = out["token_strs"] = Json::array();
    for (int32_t id : ids) strings.push_back(token_text(*model->tokenizer, id));
  }
  x->reply_json(200, out);
}

void Server::Impl::detokenize(const ExchangePtr& x, const ModelContext* model) {
  Json body;
  if (!read_body(x, &body)) return;
  DetokenizeBody parsed;
  if (auto error = parse_detokenize_body(body, {model->vocab_size, {}}, &parsed)) {
    return x->reply_error(*error);
  }
  if (auto error = check_model(parsed.model)) return x->reply_error(*error);
  Json out;
  out["prompt"] = model->tokenizer->decode(parsed.tokens, false);
  x->reply_json(200, out);
}

Server::Server(ServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Server::~Server() { stop(0); }

Status Server::start() {
  if (impl_->options.served_model_names.empty()) {
    return invalid_argument("served_model_names: is empty, expected at least one name");
  }
  impl_->workers = std::make_unique<WorkerPool>(std::max(1, impl_->options.worker_threads));
  return impl_->http.start();
}

uint16_t Server::port() const { return impl_->http.port(); }

std::string Server::url() const {
  const std::string& host = impl_->options.http.host;
  const bool v6 = host.find(':') != std::string::npos;
  return cat("http://", v6 ? "[" : "", host, v6 ? "]" : "", ":", port());
}

void Server::set_load_progress(double fraction, std::string stage) {
  std::lock_guard lock(impl_->mutex);
  impl_->progress = std::clamp(fraction, 0.0, 1.0);
  impl_->stage = std::move(stage);
}

void Server::set_ready(ModelContext context) {
  std::lock_guard lock(impl_->mutex);
  impl_->context = std::make_shared<const ModelContext>(std::move(context));
}

bool Server::stop(double drain_seconds) {
  if (impl_->stopped.exchange(true)) return true;
  impl_->draining = true;
  bool clean = true;
  // The listener stays until the engine is done, so that /health can say "draining".
  if (auto model = impl_->ready()) clean = model->engine->drain(drain_seconds);
  impl_->http.stop(impl_->cut_short ? 0.5 : 5);
  impl_->workers.reset();
  return clean;
}

void Server::stop_now() {
  impl_->draining = true;
  impl_->cut_short = true;
  std::vector<std::weak_ptr<GenerationJob>> jobs;
  {
    std::lock_guard lock(impl_->mutex);
    jobs = impl_->jobs;
  }
  for (const auto& weak : jobs) {
    if (auto job = weak.lock()) job->cancel(kShutDown);
  }
}

}  // namespace k3
