// k3: runs and serves the Kimi K3 language model. docs/cli.md describes each command.
#include <cstdio>
#include <iostream>
#include <string>

#include "cli/args.h"
#include "cli/commands.h"
#include "version.h"

extern char** environ;

namespace {

// A misspelt K3_ variable would silently do nothing; say so instead.
void warn_of_unknown_environment() {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    if (name.rfind("K3_", 0) == 0 && k3::cli::known_environment().count(name) == 0) {
      std::fprintf(stderr, "k3: environment variable %s is not the twin of any flag\n",
                   name.c_str());
    }
  }
}

// The first flag that no command knows. Looked for before any other complaint: the value that
// followed it may have been taken for the model, and that is not what to tell the user.
std::string unknown_flag(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    for (const std::string& left : command->remaining()) {
      if (left.size() > 1 && left.front() == '-') return left;
    }
  }
  return "";
}

// What a command printed and could not get rid of is not done: a full disk, a closed output.
int checked_output(int exit_code) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return exit_code;
  std::fprintf(stderr, "k3: standard output cannot be written\n");
  return exit_code == 0 ? 1 : exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "k3 runs and serves the Kimi K3 language model.\n\n"
      "  k3 generate --model models/k3-nano --prompt \"The capital of France is\"\n"
      "  k3 chat --model models/k3-nano\n"
      "  k3 serve --model models/k3-nano            # OpenAI-compatible, http://127.0.0.1:8000/v1\n"
      "\nEvery --flag-name can be given as K3_FLAG_NAME in the environment."};
  app.set_version_flag("--version", std::string("k3 ") + k3::kVersion);
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  int exit_code = 0;
  using namespace k3::cli;
  add_generate(app.add_subcommand("generate", "Continue a prompt"), &exit_code);
  add_chat(app.add_subcommand("chat", "Talk to the model in the terminal"), &exit_code);
  add_serve(app.add_subcommand("serve", "Serve the OpenAI API over HTTP"), &exit_code);
  add_logits(app.add_subcommand("logits", "Write the logits of a token sequence"), &exit_code);
  add_tokenize(app.add_subcommand("tokenize", "Text to token ids"), &exit_code);
  add_detokenize(app.add_subcommand("detokenize", "Token ids to text"), &exit_code);
  add_inspect(app.add_subcommand("inspect", "Check a checkpoint from its headers"), &exit_code);
  add_synth(app.add_subcommand("synth", "Write a synthetic checkpoint"), &exit_code);
  add_bench(app.add_subcommand("bench", "Measure prefill and decode"), &exit_code);
  warn_of_unknown_environment();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return checked_output(app.exit(e));  // --help, --version
    if (const std::string flag = unknown_flag(app); !flag.empty()) {
      std::fprintf(stderr, "k3: unknown flag '%s'; k3 %s --help lists them\n", flag.c_str(),
                   app.get_subcommands().front()->get_name().c_str());
      return 2;
    }
    if (app.get_subcommands().empty() && argc > 1) {
      std::fprintf(stderr, "k3: unknown command '%s'; k3 --help lists them\n", argv[1]);
      return 2;
    }
    app.exit(e);
    return 2;
  }
  return checked_output(exit_code);
}
