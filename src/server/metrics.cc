#include "server/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace k3 {
namespace {

std::string number(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", v);
  return text;
}

std::string escaped(const std::string& label) {
  std::string out;
  for (char c : label) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

void header(const std::string& name, const char* kind, const std::string& help, std::string* out) {
  *out += "# HELP " + name + " " + help + "\n# TYPE " + name + " " + kind + "\n";
}

void single(const std::string& name, const char* kind, const std::string& help,
            const std::string& labels, double value, std::string* out) {
  header(name, kind, help, out);
  *out += name + labels + " " + number(value) + "\n";
}

double resident_bytes() {
  long pages = 0;  // NOLINT(google-runtime-int): what %ld wants
  if (std::FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%*s %ld", &pages) != 1) pages = 0;
    std::fclose(f);
  }
  return static_cast<double>(pages) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

std::vector<double> seconds_bounds() {
  return {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
          1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
}

std::vector<double> token_bounds() {
  return {1,    2,    5,    10,    20,    50,    100,    200,    500,
          1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000};
}

}  // namespace

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::observe(double value) {
  const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  std::lock_guard lock(mutex_);
  ++counts_[static_cast<size_t>(at)];
  sum_ += value;
}

void Histogram::print(const std::string& name, const std::string& help, const std::string& labels,
                      std::string* out) const {
  header(name, "histogram", help, out);
  std::lock_guard lock(mutex_);
  const std::string open = labels.substr(0, labels.size() - 1) + ",le=\"";
  int64_t total = 0;
  for (size_t i = 0; i <= bounds_.size(); ++i) {
    total += counts_[i];
    *out += cat(name, "_bucket", open, i < bounds_.size() ? number(bounds_[i]) : "+Inf", "\"} ",
                total, "\n");
  }
  *out += name + "_sum" + labels + " " + number(sum_) + "\n";
  *out += name + "_count" + labels + " " + std::to_string(total) + "\n";
}

Metrics::Metrics()
    : ttft_(seconds_bounds()),
      tpot_(seconds_bounds()),
      e2e_(seconds_bounds()),
      queue_(seconds_bounds()),
      prompt_tokens_(token_bounds()),
      generation_tokens_(token_bounds()) {}

void Metrics::count_http(const std::string& method, const std::string& path, int status) {
  std::lock_guard lock(mutex_);
  ++http_[{method, path, std::to_string(status)}];
}

void Metrics::count_choice(const FinishInfo& info, const std::string& finish) {
  {
    std::lock_guard lock(mutex_);
    ++finished_[finish];
  }
  const RequestStats& s = info.stats;
  if (info.reason == FinishReason::kCancelled || info.reason == FinishReason::kError) return;
  ttft_.observe(s.ttft_seconds);
  queue_.observe(s.queue_seconds);
  e2e_.observe(s.total_seconds);
  if (s.completion_tokens > 1) {
    tpot_.observe((s.total_seconds - s.ttft_seconds) /
                  static_cast<double>(s.completion_tokens - 1));
  }
  prompt_tokens_.observe(static_cast<double>(s.prompt_tokens));
  generation_tokens_.observe(static_cast<double>(s.completion_tokens));
}

std::string Metrics::print(const std::string& model, const EngineStats* engine) const {
  const std::string name = "model_name=\"" + escaped(model) + "\"";
  const std::string labels = "{" + name + "}";
  std::string out;
  if (engine != nullptr) {
    const EngineStats& s = *engine;
    const auto d = [](int64_t v) { return static_cast<double>(v); };
    single("k3:num_requests_running", "gauge", "Requests that hold a slot.", labels, d(s.running),
           &out);
    single("k3:num_requests_waiting", "gauge", "Requests in the queue.", labels, d(s.waiting),
           &out);
    single("k3:slots_free", "gauge", "Free state slots.", labels, d(s.slots_free), &out);
    single("k3:kv_cache_usage_perc", "gauge", "Pages of latent cache in use, 0 to 1.", labels,
           s.pages_total > 0 ? 1.0 - d(s.pages_free) / d(s.pages_total) : 0.0, &out);
    single("k3:engine_steps_total", "counter", "Executor steps.", labels, d(s.steps), &out);
    single("k3:prompt_tokens_total", "counter", "Prompt tokens processed.", labels,
           d(s.prompt_tokens), &out);
    single("k3:generation_tokens_total", "counter", "Tokens generated.", labels,
           d(s.generated_tokens), &out);
  }
  {
    std::lock_guard lock(mutex_);
    header("k3:request_success_total", "counter", "Finished choices by finish reason.", &out);
    for (const auto& [reason, count] : finished_) {
      out += cat("k3:request_success_total{", name, ",finished_reason=\"", reason, "\"} ", count,
                 "\n");
    }
    header("k3:http_requests_total", "counter", "HTTP requests answered.", &out);
    for (const auto& [key, count] : http_) {
      out += "k3:http_requests_total{method=\"" + key[0] + "\",path=\"" + key[1] + "\",status=\"" +
             key[2] + "\"} " + std::to_string(count) + "\n";
    }
  }
  ttft_.print("k3:time_to_first_token_seconds", "Submit to first token.", labels, &out);
  tpot_.print("k3:time_per_output_token_seconds", "Mean time between a request's tokens.", labels,
              &out);
  e2e_.print("k3:e2e_request_latency_seconds", "Submit to last token.", labels, &out);
  queue_.print("k3:request_queue_time_seconds", "Submit to first scheduled.", labels, &out);
  prompt_tokens_.print("k3:request_prompt_tokens", "Prompt tokens of a request.", labels, &out);
  generation_tokens_.print("k3:request_generation_tokens", "Tokens generated by a request.", labels,
                           &out);
  single("k3:http_connections", "gauge", "Open connections.", "", static_cast<double>(connections),
         &out);
  single("k3:slow_readers_total", "counter", "Requests cancelled: the client did not read.", "",
         static_cast<double>(slow_readers), &out);
  single("k3:disconnects_total", "counter", "Requests cancelled: the client went away.", "",
         static_cast<double>(disconnects), &out);
  single("process_resident_memory_bytes", "gauge", "Resident memory.", "", resident_bytes(), &out);
  return out;
}

}  // namespace k3
