#include "cli/load.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "core/thread_pool.h"

namespace k3::cli {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t sum_bytes(const std::vector<MemoryItem>& items) {
  int64_t sum = 0;
  for (const MemoryItem& item : items) sum += item.bytes;
  return sum;
}

// Turns what was asked for into sizes that fit, or says with numbers why none do. `neighbours`
// ranks of this machine want the same.
Result<CpuExecutorOptions> size_executor(const ModelConfig& config, const CapacityArgs& capacity,
                                         CpuExecutorOptions options, int64_t neighbours,
                                         int64_t* max_model_len) {
  const auto refuse = [](const char* flag, int64_t value, int64_t limit) {
    return invalid_argument(flag, " ", value, ": expected 1 to ", limit);
  };
  const int64_t context = config.max_position_embeddings;
  if (capacity.max_model_len < 0 || capacity.max_model_len > context) {
    return refuse("--max-model-len", capacity.max_model_len, context);
  }
  constexpr int64_t kMaxSeqs = 4096, kMaxRows = 65536;
  if (capacity.max_num_seqs < 0 || capacity.max_num_seqs > kMaxSeqs) {
    return refuse("--max-num-seqs", capacity.max_num_seqs, kMaxSeqs);
  }
  if (capacity.max_num_batched_tokens < 1 || capacity.max_num_batched_tokens > kMaxRows) {
    return refuse("--max-num-batched-tokens", capacity.max_num_batched_tokens, kMaxRows);
  }
  *max_model_len = capacity.max_model_len > 0 ? capacity.max_model_len : context;

  CpuExecutorOptions one = options;
  one.num_slots = 1;
  one.num_pages = 1;
  const std::vector<MemoryItem> unit = CpuExecutor::plan(config, one);
  const int64_t slot_bytes = unit.at(0).bytes, page_bytes = unit.at(1).bytes;
  const int64_t available = available_memory_bytes() / neighbours;

  int64_t seqs = capacity.max_num_seqs;
  if (seqs == 0) {
    seqs = 32;
    if (available > 0 && slot_bytes > 0) {
      seqs = std::clamp<int64_t>(available / 4 / slot_bytes, 1, 32);
    }
  }
  options.num_slots = static_cast<int>(seqs);
  options.max_rows = std::max(capacity.max_num_batched_tokens, seqs);
  options.max_logit_rows = std::max(capacity.max_logit_rows, seqs);

  const int64_t pages_per_seq = ceil_div(*max_model_len, kPageTokens);
  if (capacity.kv_cache_memory_bytes != 0) {
    options.num_pages = page_bytes > 0 ? capacity.kv_cache_memory_bytes / page_bytes : 1;
    if (capacity.kv_cache_memory_bytes < 0 || options.num_pages < 1) {
      return invalid_argument("--kv-cache-memory-bytes ", capacity.kv_cache_memory_bytes,
                              ": one page of ", kPageTokens, " tokens needs ", page_bytes);
    }
  } else {
    options.num_pages = seqs * pages_per_seq;
    if (available > 0 && page_bytes > 0) {
      options.num_pages = std::clamp<int64_t>(available / 2 / page_bytes, 1, options.num_pages);
    }
  }
  options.num_pages = std::min<int64_t>(options.num_pages, INT32_MAX);
  // A context that no request could fill is not offered.
  *max_model_len = std::min(*max_model_len, options.num_pages * kPageTokens);
  if (capacity.max_model_len > *max_model_len) {
    return Status(ErrorCode::kMemory, cat("--max-model-len ", capacity.max_model_len, " needs ",
                                          pages_per_seq, " KV pages of ", human_bytes(page_bytes),
                                          ", the cache holds ", options.num_pages));
  }

  const int64_t need = sum_bytes(CpuExecutor::plan(config, options));
  if (available > 0 && need > available) {
    return Status(
        ErrorCode::kMemory,
        cat("state slots and KV pages need ", human_bytes(need), ", available ",
            human_bytes(available), " (", options.num_slots, " slots of ", human_bytes(slot_bytes),
            ", ", options.num_pages, " pages of ", human_bytes(page_bytes),
            "): lower --max-num-seqs, --max-model-len or --kv-cache-memory-bytes"));
  }
  return options;
}

// One progress bar over the checkpoints of all ranks here; the dense part they share is read once.
Status warm_all(const std::vector<std::shared_ptr<const Checkpoint>>& checkpoints, bool quiet,
                const std::function<void(double)>& progress) {
  int64_t total = 0, before = 0;
  for (const auto& c : checkpoints) total += c->total_bytes();
  ProgressBar bar("loading", quiet, progress);
  for (const auto& c : checkpoints) {
    K3_RETURN_IF_ERROR(c->warm([&](int64_t done, int64_t) { bar.update(before + done, total); }));
    before += c->total_bytes();
  }
  return {};
}

// What must be the same on every rank for their steps to fit together.
std::string what_ranks_share(const ModelConfig& c, const ModelArgs& args) {
  return cat("layers=", c.num_hidden_layers, " experts=", c.num_experts, " hidden=", c.hidden_size,
             " moe_intermediate=", c.moe_intermediate_size, " vocab=", c.vocab_size,
             " numerics=", args.numerics, " lora_norm_eps=", args.lora_norm_eps);
}

}  // namespace

void add_model_flags(CLI::App* app, ModelArgs* args, bool with_tokenizer) {
  add_model_path(app, &args->model);
  if (with_tokenizer) {
    add_flag_with_value(app, "--tokenizer", args->tokenizer,
                        "Directory of tiktoken.model, if not the model's");
  }
  add_flag_with_value(app, "--layers", args->layers, "Run the first N layers only (0: all)");
  add_flag_with_value(app, "--numerics", args->numerics,
                      "f32: float32 between operations; bf16: land where the HF reference does");
  add_flag_with_value(app, "--lora-norm-eps", args->lora_norm_eps,
                      "Epsilon of the two MLA LoRA norms (HF module: 1e-6)");
  add_flag_with_value(app, "--isa", args->isa, "auto, avx512, avx2 or portable (same bits)");
  add_flag_with_value(app, "--threads", args->threads, "Compute threads (0: every core)");
  add_switch(app, "--quiet,-q", args->quiet, "No progress and no summary on standard error");
}

void add_ep_flags(CLI::App* app, ModelArgs* args) {
  add_flag_with_value(
      app, "--ep-size", args->ep_size,
      "Expert-parallel ranks: threads, or processes under mpirun; divides the experts");
  add_flag_with_value(app, "--ep-timeout", args->ep_timeout,
                      "Seconds without a rank before the group is given up (exit code 6)");
}

void add_capacity_flags(CLI::App* app, CapacityArgs* args) {
  add_flag_with_value(app, "--max-model-len", args->max_model_len,
                      "Prompt + output tokens of one request (0: the model's context)");
  add_flag_with_value(app, "--max-num-seqs", args->max_num_seqs,
                      "Requests running at once (0: what memory allows, at most 32)");
  add_flag_with_value(app, "--max-num-batched-tokens", args->max_num_batched_tokens,
                      "Tokens in one step; a longer prompt is prefilled in chunks");
  add_flag_with_value(app, "--kv-cache-memory-bytes", args->kv_cache_memory_bytes,
                      "Bytes for KV pages (0: from the two limits above and free memory)");
}

void add_model_path(CLI::App* app, std::string* model) {
  CLI::Option* flag = add_flag_with_value(
      app, "--model,-m", *model, "Model directory: config.json, *.safetensors, tiktoken.model");
  CLI::Option* positional = app->add_option("MODEL", *model, "The same, as the first argument");
  app->parse_complete_callback([flag, positional, model] {
    if (flag->count() + positional->count() == 0) throw CLI::RequiredError("--model");
    if (positional->count() == 0) return;
    const std::string given = positional->results().front();
    const char* twin = std::getenv(flag->get_envname().c_str());
    if (flag->count() > 0 && (twin == nullptr || flag->results().front() != twin)) {
      throw CLI::ValidationError("--model",
                                 "given twice: " + flag->results().front() + " and " + given);
    }
    *model = given;  // the command line wins over the environment
  });
}

int64_t available_memory_bytes() {
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  int64_t kib = 0;
  while (in >> key >> kib) {
    std::getline(in, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

Result<ModelConfig> load_config(const ModelArgs& args) {
  K3_ASSIGN_OR_RETURN(ModelConfig config, load_model_config(args.model));
  if (args.layers < 0 || args.layers > config.num_hidden_layers) {
    return invalid_argument("--layers ", args.layers, ": expected 0 to ", config.num_hidden_layers);
  }
  return args.layers > 0 ? truncate_layers(config, args.layers)
                         : Result<ModelConfig>(std::move(config));
}

Result<NumericsPolicy> numerics_policy(const ModelArgs& args) {
  NumericsPolicy policy;
  K3_ASSIGN_OR_RETURN(policy.numerics, parse_numerics(args.numerics));
  if (!(args.lora_norm_eps > 0) || args.lora_norm_eps > 1) {
    return invalid_argument("--lora-norm-eps ", args.lora_norm_eps, ": expected in (0, 1]");
  }
  policy.lora_norm_eps = args.lora_norm_eps;
  return policy;
}

Result<LoadedModel> load_model(const ModelArgs& args, const CapacityArgs& capacity,
                               bool with_tokenizer, const std::function<void(double)>& progress) {
  LoadedModel m;
  K3_ASSIGN_OR_RETURN(m.config, load_config(args));
  if (const Status s = check_rank_spec(m.config, {args.ep_size, 0}); !s.ok()) {
    return invalid_argument("--ep-size ", args.ep_size, ": ", s.message());
  }
  if (!(args.ep_timeout > 0) || args.ep_timeout > 86400) {
    return invalid_argument("--ep-timeout ", args.ep_timeout, ": expected in (0, 86400] seconds");
  }
  CpuExecutorOptions options;
  K3_ASSIGN_OR_RETURN(options.policy, numerics_policy(args));
  options.isa = args.isa;
  if (args.threads < 0 || args.threads > 1024) {
    return invalid_argument("--threads ", args.threads, ": expected 0 to 1024");
  }
  options.num_threads = args.threads;
  const std::optional<MpiJob> job = mpi_job();
  if (job && job->size != args.ep_size) {
    return invalid_argument("--ep-size ", args.ep_size, ": mpirun started ", job->size,
                            " processes, expected one a rank");
  }
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < args.ep_size; ++r) {
    if (!job || job->rank == r) ranks.push_back(r);
  }
  // Ranks of one machine share its cores and its memory.
  const int64_t neighbours = job ? job->local_size : args.ep_size;
  if (args.threads == 0) {
    options.num_threads = std::max(1, available_cores() / static_cast<int>(neighbours));
  }
  int64_t max_model_len = 0;
  K3_ASSIGN_OR_RETURN(options,
                      size_executor(m.config, capacity, options, neighbours, &max_model_len));
  if (with_tokenizer) {
    K3_ASSIGN_OR_RETURN(
        m.tokenizer,
        Tokenizer::load(args.tokenizer.empty() ? args.model : args.tokenizer, m.config.vocab_size));
  }
  if (!args.quiet) {
    std::string unused;
    for (const std::string& key : m.config.ignored_keys)
      unused += (unused.empty() ? "" : ", ") + key;
    if (!unused.empty()) std::fprintf(stderr, "config.json: not used: %s\n", unused.c_str());
  }
  std::vector<std::shared_ptr<const Checkpoint>> checkpoints;
  for (const int64_t r : ranks) {
    K3_ASSIGN_OR_RETURN(std::unique_ptr<Checkpoint> checkpoint,
                        Checkpoint::open(args.model, m.config, {args.ep_size, r}));
    checkpoints.push_back(std::move(checkpoint));
  }
  if (!args.quiet) {
    for (const std::string& note : checkpoints.front()->plan().notes) {
      std::fprintf(stderr, "checkpoint: %s\n", note.c_str());
    }
  }
  K3_RETURN_IF_ERROR(warm_all(checkpoints, args.quiet, progress));
  if (args.ep_size > 1) {
    const SlabShape shape{args.ep_size, options.max_rows, m.config.num_experts_per_token,
                          m.config.routed_expert_hidden_size};
    if (job) {
      std::vector<int64_t> limits{options.num_slots, options.num_pages, max_model_len};
      K3_ASSIGN_OR_RETURN(
          std::unique_ptr<MpiGroup> mpi,
          MpiGroup::create(shape, args.ep_timeout, what_ranks_share(m.config, args), limits));
      options.num_slots = static_cast<int>(limits[0]);
      options.num_pages = limits[1];
      max_model_len = limits[2];
      m.mpi = mpi.get();
      m.ep = std::move(mpi);
    } else {
      K3_ASSIGN_OR_RETURN(m.ep, ThreadGroup::create(shape, args.ep_timeout));
    }
    options.ep = m.ep.get();
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    K3_ASSIGN_OR_RETURN(
        std::unique_ptr<CpuExecutor> executor,
        CpuExecutor::create(checkpoints[i], m.config, {args.ep_size, ranks[i]}, options));
    m.executors.push_back(std::move(executor));
  }

  m.engine.max_model_len = max_model_len;
  m.engine.max_num_seqs = options.num_slots;
  m.engine.max_num_batched_tokens = options.max_rows;
  for (const int64_t id : m.config.eos_token_ids) {
    m.engine.end_token_ids.push_back(static_cast<int32_t>(id));
  }
  // The released config names end_of_msg alone, yet runs have ended with [EOS]: stop on both.
  if (m.tokenizer && m.tokenizer->markup().eos >= 0) {
    m.engine.end_token_ids.push_back(m.tokenizer->markup().eos);
  }
  std::sort(m.engine.end_token_ids.begin(), m.engine.end_token_ids.end());
  m.engine.end_token_ids.erase(
      std::unique(m.engine.end_token_ids.begin(), m.engine.end_token_ids.end()),
      m.engine.end_token_ids.end());
  m.engine.clock = monotonic_seconds;
  if (!args.quiet) {
    for (const auto& executor : m.executors) {
      std::fprintf(stderr, "%s\n", executor->description().c_str());
      for (const MemoryItem& item : executor->memory()) {
        std::fprintf(stderr, "  %-20s %s\n", item.name.c_str(), human_bytes(item.bytes).c_str());
      }
    }
    std::string ends;
    for (const int32_t id : m.engine.end_token_ids) ends += cat(ends.empty() ? "" : ", ", id);
    std::fprintf(stderr, "  %lld slots, %lld KV tokens, context %lld, end ids {%s}\n",
                 static_cast<long long>(m.engine.max_num_seqs),
                 static_cast<long long>(options.num_pages) * kPageTokens,
                 static_cast<long long>(max_model_len), ends.c_str());
  }
  return m;
}

}  // namespace k3::cli
