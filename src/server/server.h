// The OpenAI-compatible server (docs/serving.md). It listens before there is a model: /health
// reports loading progress, everything else answers 503 until set_ready.
//
//   Server server(options);
//   server.start();                       // bound; prints nothing, ask port()
//   server.set_load_progress(0.37, "..."); // from any thread, any number of times
//   server.set_ready(context);
//   ... wait for SIGTERM or SIGINT ...
//   server.stop(30);                      // second signal: server.stop_now() from another thread
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "engine/front_end.h"
#include "server/generation_defaults.h"
#include "server/http_server.h"
#include "text/tokenizer.h"

namespace k3 {

struct ServerOptions {
  HttpOptions http;
  std::vector<std::string>
      served_model_names;             // at least one; the first is the model's id in answers
  std::vector<std::string> api_keys;  // empty = no key needed; guards /v1 and (de)tokenize
  std::vector<std::string> allowed_origins = {"*"};  // CORS
  std::string version;                               // of the program, for /version
  int worker_threads = 2;                            // bodies and prompts
};

struct ModelContext {
  FrontEnd* engine = nullptr;  // must outlive the server's stop()
  std::shared_ptr<const Tokenizer> tokenizer;
  int64_t vocab_size = 0;     // ModelConfig's
  int64_t max_model_len = 0;  // prompt + output tokens
  GenerationDefaults defaults;
  std::string description;  // the executor's: device, ISA, numerics policy
};

class Server {
 public:
  explicit Server(ServerOptions options);
  ~Server();  // stop(0)

  // Binds the address and starts the threads. kInvalidArgument for bad options, kUnavailable for a
  // port in use.
  Status start();
  uint16_t port() const;
  std::string url() const;  // http://127.0.0.1:8000

  void set_load_progress(double fraction, std::string stage);
  void set_ready(ModelContext context);

  // Refuses new requests (503), lets those in progress finish for up to `drain_seconds`, cancels
  // the rest, closes every connection and joins the threads. True if all finished by themselves.
  bool stop(double drain_seconds);
  // From another thread while stop() waits: cancels what is left at once.
  void stop_now();

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
