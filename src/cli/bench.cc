#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "cli/commands.h"
#include "cli/load.h"
#include "cli/ranks.h"
#include "core/thread_pool.h"
#include "version.h"

namespace k3::cli {
namespace {

struct BenchArgs {
  ModelArgs model;
  std::vector<int64_t> batch{1};
  std::vector<int64_t> context{128};
  int64_t decode_steps = 32;
  int64_t max_num_batched_tokens = 512;
  bool json = false;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

// Bytes a second that all threads together read from a buffer far larger than the caches: the best
// of five passes, in the same run as everything it is compared with.
double read_ceiling(int threads) {
  constexpr size_t kBytes = size_t{1} << 30;
  constexpr size_t kBlock = size_t{1} << 20;
  std::vector<uint64_t> buffer(kBytes / sizeof(uint64_t), 1);
  std::vector<uint64_t> sums(kBytes / kBlock);
  ThreadPool pool(threads);
  double best = 0;
  for (int pass = 0; pass < 5; ++pass) {
    const double start = monotonic_seconds();
    pool.parallel_for(static_cast<int64_t>(kBytes / kBlock), [&](int64_t block, int) {
      const uint64_t* p = buffer.data() + static_cast<size_t>(block) * (kBlock / sizeof(uint64_t));
      uint64_t sum[8] = {};
      for (size_t i = 0; i < kBlock / sizeof(uint64_t); i += 8) {
        for (size_t lane = 0; lane < 8; ++lane) sum[lane] += p[i + lane];
      }
      sums[static_cast<size_t>(block)] = std::accumulate(sum, sum + 8, uint64_t{0});
    });
    const double rate = static_cast<double>(kBytes) / (monotonic_seconds() - start);
    best = std::max(best, rate);
  }
  // Used, so that no compiler may drop the reads.
  return std::accumulate(sums.begin(), sums.end(), uint64_t{0}) == kBytes / sizeof(uint64_t) ? best
                                                                                             : 0;
}

struct Measurement {
  int64_t batch = 0, context = 0;
  double prefill_tokens_per_second = 0, ttft_seconds = 0;
  double decode_step_seconds = 0, decode_tokens_per_second = 0;
  int64_t decode_step_bytes = 0;
  double after_rest_seconds = 0;  // what a step of one token costs more after a rest
};

Result<Measurement> measure(Executor* executor, const BenchArgs& args, int64_t batch,
                            int64_t context) {
  const int64_t total = context + args.decode_steps;
  const int64_t pages_each = (total + kPageTokens - 1) / kPageTokens;
  std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(batch)), pages = tokens;
  uint64_t random = 20261201;  // fixed: the same ids in every run
  for (int64_t s = 0; s < batch; ++s) {
    const auto i = static_cast<size_t>(s);
    pages[i].resize(static_cast<size_t>(pages_each));
    std::iota(pages[i].begin(), pages[i].end(), static_cast<int32_t>(s * pages_each));
    for (int64_t t = 0; t < total; ++t) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      tokens[i].push_back(static_cast<int32_t>(
          (random >> 33) % static_cast<uint64_t>(executor->limits().vocab_size)));
    }
  }
  Measurement m{batch, context};
  StepResult result;
  const double start = monotonic_seconds();
  for (int64_t s = 0; s < batch; ++s) {
    const auto i = static_cast<size_t>(s);
    for (int64_t at = 0; at < context; at += args.max_num_batched_tokens) {
      const int64_t n = std::min(args.max_num_batched_tokens, context - at);
      StepBatch step{{{static_cast<int>(s),
                       at,
                       {tokens[i].data() + at, static_cast<size_t>(n)},
                       pages[i],
                       at + n == context ? Logits::kLast : Logits::kNone}}};
      K3_RETURN_IF_ERROR(executor->step(step, &result));
    }
    if (s == 0) m.ttft_seconds = monotonic_seconds() - start;
  }
  m.prefill_tokens_per_second =
      static_cast<double>(batch * context) / (monotonic_seconds() - start);
  std::vector<double> seconds;
  for (int64_t d = 0; d < args.decode_steps; ++d) {
    StepBatch step;
    for (int64_t s = 0; s < batch; ++s) {
      const auto i = static_cast<size_t>(s);
      step.segments.push_back({static_cast<int>(s),
                               context + d,
                               {tokens[i].data() + context + d, 1},
                               pages[i],
                               Logits::kLast});
    }
    const double before = monotonic_seconds();
    K3_RETURN_IF_ERROR(executor->step(step, &result));
    seconds.push_back(monotonic_seconds() - before);
    m.decode_step_bytes = std::max(m.decode_step_bytes, result.bytes);
  }
  m.decode_step_seconds = median(seconds);
  m.decode_tokens_per_second = static_cast<double>(batch) / m.decode_step_seconds;
  // The same short step each time, a new sequence of one token: how much longer it takes when
  // nothing ran for 20 ms. With several ranks that is the wake-up of the others, beside caches gone
  // cold.
  const auto step_seconds = [&](int pause_ms) -> Result<double> {
    std::vector<double> each;
    for (int i = 0; i < 31; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
      const double before = monotonic_seconds();
      K3_RETURN_IF_ERROR(
          executor->step({{{0, 0, {tokens[0].data(), 1}, pages[0], Logits::kLast}}}, &result));
      each.push_back(monotonic_seconds() - before);
    }
    return median(each);
  };
  K3_ASSIGN_OR_RETURN(const double rested, step_seconds(20));
  K3_ASSIGN_OR_RETURN(const double busy, step_seconds(0));
  m.after_rest_seconds = rested - busy;
  return m;
}

Status bench(const BenchArgs& args) {
  const auto check = [](const char* flag, const std::vector<int64_t>& values,
                        int64_t limit) -> Status {
    for (const int64_t v : values) {
      if (v < 1 || v > limit) return invalid_argument(flag, " ", v, ": expected 1 to ", limit);
    }
    return {};
  };
  K3_RETURN_IF_ERROR(check("--batch", args.batch, 4096));
  K3_RETURN_IF_ERROR(check("--context", args.context, int64_t{1} << 24));
  K3_RETURN_IF_ERROR(check("--decode-steps", {args.decode_steps}, 1 << 20));
  const int64_t longest =
      *std::max_element(args.context.begin(), args.context.end()) + args.decode_steps;
  K3_ASSIGN_OR_RETURN(const ModelConfig config, load_config(args.model));
  if (longest > config.max_position_embeddings) {
    return invalid_argument("--context and --decode-steps: ", longest,
                            " tokens, the model's context is ", config.max_position_embeddings);
  }
  CapacityArgs capacity;
  capacity.max_num_seqs = *std::max_element(args.batch.begin(), args.batch.end());
  capacity.max_model_len = std::min((longest + kPageTokens - 1) / kPageTokens * kPageTokens,
                                    config.max_position_embeddings);
  capacity.max_num_batched_tokens = args.max_num_batched_tokens;
  K3_ASSIGN_OR_RETURN(LoadedModel model, load_model(args.model, capacity, false));
  if (led_by_rank_0(model)) return follow_rank_0(model);
  const auto others = idle_ranks(model);
  const int threads = args.model.threads > 0 ? args.model.threads : available_cores();
  const double ceiling = read_ceiling(threads);
  nlohmann::ordered_json report = {{"k3", kVersion},
                                   {"model", args.model.model},
                                   {"executor", model.executor().description()},
                                   {"read_ceiling_gb_s", ceiling / 1e9},
                                   {"runs", nlohmann::ordered_json::array()}};
  if (!args.json) {
    std::printf("%s\nread ceiling %.1f GB/s (1 GiB, %d threads, best of 5)\n",
                model.executor().description().c_str(), ceiling / 1e9, threads);
    std::printf("%6s %8s %14s %10s %12s %14s %12s %10s %8s %12s\n", "batch", "context",
                "prefill tok/s", "TTFT ms", "decode ms", "decode tok/s", "MB/step", "GB/s",
                "ceiling", "rest +ms");
  }
  for (const int64_t batch : args.batch) {
    for (const int64_t context : args.context) {
      K3_ASSIGN_OR_RETURN(const Measurement m, measure(&model.executor(), args, batch, context));
      const double rate = static_cast<double>(m.decode_step_bytes) / m.decode_step_seconds;
      report["runs"].push_back({{"batch", m.batch},
                                {"context", m.context},
                                {"prefill_tokens_per_second", m.prefill_tokens_per_second},
                                {"ttft_seconds", m.ttft_seconds},
                                {"decode_step_seconds", m.decode_step_seconds},
                                {"decode_tokens_per_second", m.decode_tokens_per_second},
                                {"decode_step_bytes", m.decode_step_bytes},
                                {"decode_gb_s", rate / 1e9},
                                {"ratio_to_ceiling", rate / ceiling},
                                {"after_rest_seconds", m.after_rest_seconds}});
      if (!args.json) {
        std::printf("%6lld %8lld %14.1f %10.1f %12.3f %14.1f %12.1f %10.2f %7.0f%% %12.3f\n",
                    static_cast<long long>(m.batch), static_cast<long long>(m.context),
                    m.prefill_tokens_per_second, m.ttft_seconds * 1e3, m.decode_step_seconds * 1e3,
                    m.decode_tokens_per_second, static_cast<double>(m.decode_step_bytes) / 1e6,
                    rate / 1e9, 100 * rate / ceiling, m.after_rest_seconds * 1e3);
        std::fflush(stdout);
      }
    }
  }
  if (args.json) std::printf("%s\n", report.dump(2).c_str());
  return {};
}

}  // namespace

void add_bench(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<BenchArgs>();
  app->footer(
      "Bytes of a step: every matrix once, the experts its tokens chose, state read and written,\n"
      "latents of the context. The ceiling is measured in the same run; a model that fits the\n"
      "processor's caches can exceed it.");
  add_model_flags(app, &args->model, false);
  add_ep_flags(app, &args->model);
  add_flag_with_value(app, "--batch", args->batch, "Sequences decoding together (a list: 1,8,32)")
      ->delimiter(',');
  add_flag_with_value(app, "--context", args->context, "Prompt tokens of each (a list)")
      ->delimiter(',');
  add_flag_with_value(app, "--decode-steps", args->decode_steps, "Steps; the median is reported");
  add_flag_with_value(app, "--max-num-batched-tokens", args->max_num_batched_tokens,
                      "Tokens in one prefill step");
  add_switch(app, "--json", args->json, "One JSON object on standard output");
  app->callback([args, exit_code] { *exit_code = report(bench(*args)); });
}

}  // namespace k3::cli
