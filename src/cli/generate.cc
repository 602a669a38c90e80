#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>

#include "cli/commands.h"
#include "cli/load.h"
#include "cli/run_request.h"
#include "cli/sampling_args.h"
#include "text/output_parser.h"

namespace k3::cli {
namespace {

struct GenerateArgs {
  ModelArgs model;
  CapacityArgs capacity;
  SamplingArgs sampling;
  std::string prompt, prompt_file;
  int64_t max_tokens = 128;
  bool special = false;
};

// Prints text as it comes: whole characters, stop strings held back.
class PrintSink : public TokenSink {
 public:
  PrintSink(std::shared_ptr<const Tokenizer> tokenizer, std::vector<std::string> stop)
      : tokenizer_(std::move(tokenizer)), stop_(std::move(stop)) {}

  bool on_token(const TokenOutput& token) override {
    if (token.is_end) return true;
    // A control token has no text of its own.
    if (tokenizer_->is_special(token.token)) return true;
    write(stop_.push(utf8_.push(tokenizer_->token_bytes(token.token))));
    return stop_.matched() < 0 && std::ferror(stdout) == 0;
  }
  void on_finish(const FinishInfo& info) override {
    if (stop_.matched() < 0) {
      write(stop_.push(utf8_.flush()));
      write(stop_.flush());
    }
    finish = info;
  }
  FinishInfo finish;

 private:
  static void write(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
  std::shared_ptr<const Tokenizer> tokenizer_;
  Utf8Stream utf8_;
  StopMatcher stop_;
};

Result<std::string> read_prompt(const GenerateArgs& args) {
  if (args.prompt_file.empty()) return args.prompt;
  return read_input("--prompt-file", args.prompt_file);
}

Status generate(const GenerateArgs& args) {
  K3_RETURN_IF_ERROR(check_stop_strings(args.sampling.stop));
  K3_ASSIGN_OR_RETURN(const std::string prompt, read_prompt(args));
  if (prompt.empty()) return invalid_argument("--prompt: empty, expected some text");
  CapacityArgs capacity = args.capacity;
  if (capacity.max_num_seqs == 0) capacity.max_num_seqs = 1;
  K3_ASSIGN_OR_RETURN(LoadedModel m, load_model(args.model, capacity, true));
  Request request;
  request.prompt =
      args.special ? m.tokenizer->encode_with_special(prompt) : m.tokenizer->encode(prompt);
  request.sampling = args.sampling.params(args.max_tokens);
  auto sink = std::make_shared<PrintSink>(m.tokenizer, args.sampling.stop);
  request.sink = sink;
  Engine engine(&m.executor(), m.engine);
  K3_RETURN_IF_ERROR(run_request(&engine, std::move(request)));
  if (isatty(STDOUT_FILENO) == 1) std::fputc('\n', stdout);
  const RequestStats& stats = sink->finish.stats;
  if (!args.model.quiet) {
    const double decode = stats.total_seconds - stats.ttft_seconds;
    std::fprintf(stderr,
                 "%lld prompt tokens, first token after %.0f ms; %lld tokens, %.1f tokens/s\n",
                 static_cast<long long>(stats.prompt_tokens), stats.ttft_seconds * 1e3,
                 static_cast<long long>(stats.completion_tokens),
                 decode > 0 && stats.completion_tokens > 1
                     ? static_cast<double>(stats.completion_tokens - 1) / decode
                     : 0.0);
  }
  if (sink->finish.reason == FinishReason::kCancelled) {
    // Interrupted: whoever started this must see it, as of any program.
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
  }
  return sink->finish.error;
}

}  // namespace

void add_generate(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<GenerateArgs>();
  app->footer("The completion alone goes to standard output; everything else to standard error.");
  add_model_flags(app, &args->model, true);
  CLI::Option* prompt = add_flag_with_value(app, "--prompt,-p", args->prompt, "Text to continue");
  CLI::Option* file = add_flag_with_value(app, "--prompt-file", args->prompt_file,
                                          "File with the text to continue (-: standard input)");
  prompt->excludes(file);
  add_flag_with_value(app, "--max-tokens,-n", args->max_tokens, "Tokens to generate at most");
  add_switch(app, "--special", args->special,
             "Read special tokens spelt out in the prompt as such");
  add_sampling_flags(app, &args->sampling);
  add_capacity_flags(app, &args->capacity);
  app->callback([args, prompt, file, exit_code] {
    if (prompt->count() + file->count() == 0) {
      *exit_code = report(invalid_argument("generate needs --prompt or --prompt-file"));
      return;
    }
    *exit_code = report(generate(*args));
  });
}

}  // namespace k3::cli
