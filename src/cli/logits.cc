#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <sstream>

#include "cli/commands.h"
#include "cli/load.h"
#include "cli/ranks.h"
#include "cli/token_ids.h"

namespace k3::cli {
namespace {

struct LogitsArgs {
  ModelArgs model;
  std::string tokens, out;
  std::string mode = "prefill";
  int64_t chunk = 512;
};

Result<std::vector<int32_t>> read_ids(const std::string& path, int64_t vocab_size) {
  K3_ASSIGN_OR_RETURN(const std::string text, read_input("--tokens", path));
  std::istringstream in(text);
  K3_ASSIGN_OR_RETURN(std::vector<int32_t> ids, parse_token_ids(in, path, vocab_size));
  if (ids.empty()) return invalid_argument("--tokens ", path, ": no token ids");
  return ids;
}

Status logits(const LogitsArgs& args) {
  if (args.mode != "prefill" && args.mode != "walk") {
    return invalid_argument("--mode ", args.mode, ": expected prefill or walk");
  }
  if (args.chunk < 1) return invalid_argument("--chunk ", args.chunk, ": expected at least 1");
  K3_ASSIGN_OR_RETURN(const ModelConfig config, load_config(args.model));
  K3_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, read_ids(args.tokens, config.vocab_size));
  const auto count = static_cast<int64_t>(ids.size());
  if (count > config.max_position_embeddings) {
    return invalid_argument("--tokens ", args.tokens, ": ", count, " ids, the model's context is ",
                            config.max_position_embeddings);
  }
  const int64_t chunk = args.mode == "walk" ? 1 : std::min(args.chunk, count);
  CapacityArgs capacity;
  capacity.max_model_len = count;
  capacity.max_num_seqs = 1;
  capacity.max_num_batched_tokens = chunk;
  capacity.max_logit_rows = chunk;
  // Before the load, which may take minutes; under mpirun rank 0 alone writes.
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(nullptr, std::fclose);
  const auto write_error = [&args] {
    return invalid_argument("--out ", args.out, ": ", std::strerror(errno));
  };
  if (const auto job = mpi_job(); !job || job->rank == 0) {
    out.reset(std::fopen(args.out.c_str(), "wb"));
    if (!out) return write_error();
  }
  K3_ASSIGN_OR_RETURN(LoadedModel m, load_model(args.model, capacity, false));
  if (led_by_rank_0(m)) return follow_rank_0(m);
  const auto others = idle_ranks(m);

  std::vector<int32_t> pages(static_cast<size_t>((count + kPageTokens - 1) / kPageTokens));
  std::iota(pages.begin(), pages.end(), 0);
  for (int64_t at = 0; at < count; at += chunk) {
    const auto n = static_cast<size_t>(std::min(chunk, count - at));
    StepBatch batch{{{0, at, {ids.data() + at, n}, pages, Logits::kAll}}};
    StepResult result;
    K3_RETURN_IF_ERROR(m.executor().step(batch, &result));
    if (std::fwrite(result.logits.data(), sizeof(float), result.logits.size(), out.get()) !=
        result.logits.size()) {
      return write_error();
    }
  }
  if (std::fflush(out.get()) != 0) return write_error();
  if (!args.model.quiet) {
    std::fprintf(stderr, "wrote [%lld, %lld] float32 to %s\n", static_cast<long long>(count),
                 static_cast<long long>(config.vocab_size), args.out.c_str());
  }
  return {};
}

}  // namespace

void add_logits(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<LogitsArgs>();
  app->footer("Output: raw little-endian float32 [tokens, vocab], one row per token fed.");
  add_model_flags(app, &args->model, false);
  add_ep_flags(app, &args->model);
  add_flag_with_value(app, "--tokens", args->tokens, "File of token ids separated by blanks")
      ->required();
  add_flag_with_value(app, "--out", args->out, "File to write")->required();
  add_flag_with_value(app, "--mode", args->mode,
                      "prefill: in chunks; walk: one token a step (the same bits)");
  add_flag_with_value(app, "--chunk", args->chunk, "Tokens in one step of a prefill");
  app->callback([args, exit_code] { *exit_code = report(logits(*args)); });
}

}  // namespace k3::cli
