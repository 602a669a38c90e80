// How the command line is declared: every --flag-name has an environment twin K3_FLAG_NAME (a flag
// beats its twin), and an unknown flag or an unknown K3_ variable is never ignored.
#pragma once

#include <CLI/CLI.hpp>
#include <cctype>
#include <set>
#include <string>

#include "core/status.h"

namespace k3::cli {

// Environment twins of every flag declared so far, over all commands.
inline std::set<std::string>& known_environment() {
  static std::set<std::string> names;
  return names;
}

inline std::string environment_twin(const std::string& flag) {
  std::string name = "K3_";
  for (const char c : flag.substr(2)) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

inline CLI::Option* with_twin(CLI::Option* option, const std::string& flag) {
  const std::string twin = environment_twin(flag);
  known_environment().insert(twin);
  return option->envname(twin);
}

// `names` as CLI11 takes them, the long form first: "--max-tokens", "--model,-m".
template <typename T>
CLI::Option* add_flag_with_value(CLI::App* app, const std::string& names, T& value,
                                 const std::string& help) {
  return with_twin(app->add_option(names, value, help)->capture_default_str(),
                   names.substr(0, names.find(',')));
}
inline CLI::Option* add_switch(CLI::App* app, const std::string& names, bool& value,
                               const std::string& help) {
  return with_twin(app->add_flag(names, value, help), names.substr(0, names.find(',')));
}

// Exit codes (docs/cli.md): 0 done, 1 other, 2 usage, 3 checkpoint or config, 4 memory, 5 device,
// 6 rank lost.
int exit_code(const Status& status);

// Prints "k3: MESSAGE" to standard error and returns the exit code.
int report(const Status& status);

}  // namespace k3::cli
