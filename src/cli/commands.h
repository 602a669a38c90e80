// One function per command: declares its flags on `app` and sets a callback that returns an exit
// code through `exit_code`.
#pragma once

#include <CLI/CLI.hpp>

namespace k3::cli {

void add_generate(CLI::App* app, int* exit_code);
void add_chat(CLI::App* app, int* exit_code);
void add_serve(CLI::App* app, int* exit_code);
void add_logits(CLI::App* app, int* exit_code);
void add_tokenize(CLI::App* app, int* exit_code);
void add_detokenize(CLI::App* app, int* exit_code);
void add_inspect(CLI::App* app, int* exit_code);
void add_synth(CLI::App* app, int* exit_code);
void add_bench(CLI::App* app, int* exit_code);

}  // namespace k3::cli
