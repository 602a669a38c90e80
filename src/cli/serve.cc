#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "cli/commands.h"
#include "cli/load.h"
#include "cli/ranks.h"
#include "server/server.h"
#include "version.h"

namespace k3::cli {
namespace {

struct ServeArgs {
  ModelArgs model;
  CapacityArgs capacity;
  std::string host = "127.0.0.1";
  int64_t port = 8000;
  std::vector<std::string> served_model_name, api_key, allowed_origins{"*"};
  int64_t max_queue = 1024;
  double shutdown_timeout = 30;
};

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

// Waits for SIGINT and SIGTERM on a thread of its own; every other thread has them blocked. The
// first asks for a graceful stop (before the model is ready there is nothing to drain: the process
// ends), the second cuts it short.
class StopSignals {
 public:
  explicit StopSignals(Server* server) : server_(server) {
    thread_ = std::thread([this] { wait(); });
  }
  ~StopSignals() {
    done_.store(true);
    // It is waiting for this very signal.
    pthread_kill(thread_.native_handle(), SIGTERM);  // NOLINT(bugprone-bad-signal-to-kill-thread)
    thread_.join();
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  void set_ready() { ready_.store(true); }
  bool stop_requested() const { return requests_.load() > 0; }
  // mpirun asked: it kills the process two seconds later.
  bool hurried() const { return hurried_.load(); }

 private:
  void wait() {
    const sigset_t set = stop_signals();
    siginfo_t info;
    while (sigwaitinfo(&set, &info) > 0 && !done_.load()) {
      if (mpi_job() && info.si_pid == getppid()) hurried_.store(true);
      const int count = requests_.fetch_add(1) + 1;
      if (!ready_.load()) {
        std::fprintf(stderr, "stopped while loading\n");
        _exit(0);
      }
      if (count == 1) {
        std::fprintf(stderr, "stopping: new requests are refused; again to stop at once\n");
      } else {
        server_->stop_now();
      }
    }
  }

  Server* server_;
  std::atomic<bool> ready_{false}, done_{false}, hurried_{false};
  std::atomic<int> requests_{0};
  std::thread thread_;
};

Status serve(const ServeArgs& args) {
  if (args.port < 0 || args.port > 65535) {
    return invalid_argument("--port ", args.port, ": expected 0 to 65535");
  }
  if (args.max_queue < 0) {
    return invalid_argument("--max-queue ", args.max_queue, ": expected at least 0");
  }
  for (const std::string& key : args.api_key) {
    if (key.empty()) return invalid_argument("--api-key: empty, expected a key");
  }
  for (const std::string& name : args.served_model_name) {
    if (name.empty()) return invalid_argument("--served-model-name: empty, expected a name");
  }
  if (!(args.shutdown_timeout >= 0)) {
    return invalid_argument("--shutdown-timeout ", args.shutdown_timeout, ": expected at least 0");
  }
  const sigset_t set = stop_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  if (const auto job = mpi_job(); job && job->rank != 0 && args.model.ep_size > 1) {
    K3_ASSIGN_OR_RETURN(LoadedModel m, load_model(args.model, args.capacity, true));
    return follow_rank_0(m);
  }

  ServerOptions options;
  options.http.host = args.host;
  options.http.port = static_cast<uint16_t>(args.port);
  options.served_model_names = args.served_model_name;
  if (options.served_model_names.empty()) {
    // The folder's name, as a person would call it, and the path as vLLM would.
    const std::string name =
        std::filesystem::path(args.model.model).lexically_normal().filename().string();
    if (!name.empty()) options.served_model_names.push_back(name);
    if (name != args.model.model) options.served_model_names.push_back(args.model.model);
  }
  options.api_keys = args.api_key;
  options.allowed_origins = args.allowed_origins;
  options.version = kVersion;
  // What needs no weights is refused before anybody can connect.
  K3_RETURN_IF_ERROR(load_config(args.model).status());
  K3_RETURN_IF_ERROR(numerics_policy(args.model).status());
  K3_ASSIGN_OR_RETURN(const GenerationDefaults defaults,
                      load_generation_defaults(args.model.model));
  Server server(options);
  K3_RETURN_IF_ERROR(server.start());
  StopSignals signals(&server);
  std::fprintf(stderr, "listening on %s\n", server.url().c_str());
  const bool loopback =
      args.host.starts_with("127.") || args.host == "localhost" || args.host == "::1";
  if (args.api_key.empty() && !loopback) {
    std::fprintf(stderr, "warning: %s is reachable from other machines and has no --api-key\n",
                 server.url().c_str());
  }

  K3_ASSIGN_OR_RETURN(LoadedModel m,
                      load_model(args.model, args.capacity, true, [&server](double fraction) {
                        server.set_load_progress(fraction, "weights");
                      }));
  m.engine.max_queue = args.max_queue;
  Ranks ranks(m);
  RankRouter& engine = ranks.router();
  server.set_ready({&engine, m.tokenizer, m.config.vocab_size, m.engine.max_model_len, defaults,
                    m.executor().description()});
  signals.set_ready();
  std::fprintf(stderr, "ready: %s/v1, model %s\n", server.url().c_str(),
               options.served_model_names.front().c_str());
  while (!signals.stop_requested() && engine.health().ok()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  Status health = engine.health();
  report_group_failure(m, health);
  const double patience =
      signals.hurried() ? std::min(args.shutdown_timeout, 0.5) : args.shutdown_timeout;
  server.stop(health.ok() ? patience : 0);
  return health;
}

}  // namespace

void add_serve(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<ServeArgs>();
  app->footer("Endpoints and fields: docs/serving.md. /health answers from the first moment.");
  add_model_flags(app, &args->model, true);
  add_ep_flags(app, &args->model);
  add_flag_with_value(app, "--host", args->host, "Address to bind (0.0.0.0: all)");
  add_flag_with_value(app, "--port", args->port, "Port (0: any free one, printed)");
  add_flag_with_value(app, "--served-model-name", args->served_model_name,
                      "Names clients may use (default: the directory's)");
  add_flag_with_value(app, "--api-key", args->api_key, "Key clients must send (repeatable)");
  add_flag_with_value(app, "--allowed-origins", args->allowed_origins, "CORS origins");
  add_flag_with_value(
      app, "--max-queue", args->max_queue,
      "Requests that may wait besides --max-num-seqs that run; more are refused with 503");
  add_flag_with_value(app, "--shutdown-timeout", args->shutdown_timeout,
                      "Seconds that requests in progress may take after SIGTERM");
  add_capacity_flags(app, &args->capacity);
  app->callback([args, exit_code] { *exit_code = report(serve(*args)); });
}

}  // namespace k3::cli
