#include "checkpoint/synth.h"

#include <cstdio>
#include <fstream>
#include <sstream>

#include "cli/commands.h"
#include "cli/load.h"

namespace k3::cli {
namespace {

struct SynthArgs {
  std::string out, preset = "tiny", config;
  int64_t layers = 0, experts = 0;
  uint64_t seed = 1;
  int64_t max_shard_bytes = int64_t{4} << 30;
  bool no_prefix = false, quiet = false;
};

Result<ModelConfig> config_of(const SynthArgs& args) {
  if (args.layers < 0) return invalid_argument("--layers ", args.layers, ": expected >= 0");
  if (args.experts < 0) return invalid_argument("--experts ", args.experts, ": expected >= 0");
  if (args.config.empty()) return synth_preset(args.preset, args.layers, args.experts);
  K3_ASSIGN_OR_RETURN(const std::string text, read_input("--config", args.config));
  if (args.experts > 0) {
    return invalid_argument("--experts goes with --preset; write num_experts into ", args.config);
  }
  K3_ASSIGN_OR_RETURN(ModelConfig config, parse_model_config(text, args.config));
  return args.layers > 0 ? truncate_layers(config, args.layers)
                         : Result<ModelConfig>(std::move(config));
}

Status synth(const SynthArgs& args) {
  SynthOptions options;
  K3_ASSIGN_OR_RETURN(options.config, config_of(args));
  options.seed = args.seed;
  options.max_shard_bytes = args.max_shard_bytes;
  options.language_model_prefix = !args.no_prefix;
  ProgressBar bar("writing", args.quiet);
  K3_RETURN_IF_ERROR(write_synthetic(
      options, args.out, [&bar](int64_t done, int64_t total) { bar.update(done, total); }));
  if (!args.quiet) {
    std::fprintf(stderr, "wrote %s: %lld layers, %lld experts, %s of weights\n", args.out.c_str(),
                 static_cast<long long>(options.config.num_hidden_layers),
                 static_cast<long long>(options.config.num_experts),
                 human_bytes(synth_payload_bytes(options.config)).c_str());
  }
  return {};
}

}  // namespace

void add_synth(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<SynthArgs>();
  app->footer(
      "Presets: tiny (k3-nano's dimensions, 32 MB), 1g (1 GiB, real head sizes), k3 (the release;\n"
      "combine with --layers and --experts). The same seed writes the same bytes anywhere.");
  add_flag_with_value(app, "--out,-o", args->out, "New or empty directory")->required();
  CLI::Option* preset = add_flag_with_value(app, "--preset", args->preset, "Dimensions to write");
  add_flag_with_value(app, "--config", args->config, "Take the dimensions of this config.json")
      ->excludes(preset);
  add_flag_with_value(app, "--layers", args->layers, "This many layers (0: the preset's)");
  add_flag_with_value(app, "--experts", args->experts, "This many experts (0: the preset's)");
  add_flag_with_value(app, "--seed", args->seed, "Seed of the weights");
  add_flag_with_value(app, "--max-shard-bytes", args->max_shard_bytes, "Bytes of a shard at most");
  add_switch(app, "--no-prefix", args->no_prefix, "Names without `language_model.`");
  add_switch(app, "--quiet,-q", args->quiet, "No progress on standard error");
  app->callback([args, exit_code] { *exit_code = report(synth(*args)); });
}

}  // namespace k3::cli
