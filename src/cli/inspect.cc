#include "checkpoint/inspect.h"

#include <cstdio>

#include "cli/commands.h"
#include "cli/load.h"

namespace k3::cli {
namespace {

struct InspectArgs {
  std::string model;
  InspectOptions options;
  bool json = false;
};

// The report is printed whatever the coverage; weights that are missing or broken are its exit
// code.
Status inspect(const InspectArgs& args) {
  K3_ASSIGN_OR_RETURN(const InspectReport report, inspect_checkpoint(args.model, args.options));
  const std::string text = args.json ? render_json(report) : render_text(report);
  std::fwrite(text.data(), 1, text.size(), stdout);
  return report.coverage;
}

}  // namespace

void add_inspect(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<InspectArgs>();
  app->footer("Reads config.json and the headers of the shards; no weight is read.");
  add_model_path(app, &args->model);
  add_flag_with_value(app, "--ep-size", args->options.ep_size, "Plan for this many ranks");
  add_flag_with_value(app, "--layers", args->options.num_layers, "First N layers only (0: all)");
  add_switch(app, "--json", args->json, "One JSON object");
  app->callback([args, exit_code] { *exit_code = report(inspect(*args)); });
}

}  // namespace k3::cli
