// How the command line is declared: every --flag-name has an environment twin K3_FLAG_NAME (a flag
// beats its twin), and an unknown flag or an unknown K3_ variable is never ignored.
#pragma once

#include <CLI/CLI.hpp>
#include <cctype>
#include <charconv>
#include <limits>
#include <set>
#include <string>
#include <type_traits>

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

// The number type behind a flag's value: of int64_t, std::vector<int64_t>, std::optional<uint64_t>.
template <typename T, typename = void>
struct NumberOf {
  using type = T;
};
template <typename T>
struct NumberOf<T, std::void_t<typename T::value_type>> {
  using type = typename T::value_type;
};

// "" if `text` is a T and nothing else, or what was found and expected. CLI11 reads a number too
// large for its type as the largest there is.
template <typename T>
std::string check_number(const std::string& text) {
  T value{};
  const char* begin = text.data() + (text.size() > 1 && text[0] == '+' ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(begin, end, value);
  if (error == std::errc() && at == end) return "";
  // Out of range for a float is inf or 0, which the value's own limits judge.
  if (std::is_floating_point_v<T> && error == std::errc::result_out_of_range && at == end)
    return "";
  if constexpr (std::is_integral_v<T>) {
    return cat("found '", text, "', expected a whole number from ", std::numeric_limits<T>::min(),
               " to ", std::numeric_limits<T>::max());
  }
  return cat("found '", text, "', expected a number");
}

// `names` as CLI11 takes them, the long form first: "--max-tokens", "--model,-m".
template <typename T>
CLI::Option* add_flag_with_value(CLI::App* app, const std::string& names, T& value,
                                 const std::string& help) {
  CLI::Option* option = app->add_option(names, value, help)->capture_default_str();
  using Number = typename NumberOf<T>::type;
  if constexpr (std::is_arithmetic_v<Number> && sizeof(Number) > 1) {
    option->check(check_number<Number>, "");
  }
  return with_twin(option, names.substr(0, names.find(',')));
}
inline CLI::Option* add_switch(CLI::App* app, const std::string& names, bool& value,
                               const std::string& help) {
  return with_twin(app->add_flag(names, value, help), names.substr(0, names.find(',')));
}

// A file the user named by `flag`, or standard input for "-": at most 64 MiB. Pipes are welcome.
Result<std::string> read_input(const std::string& flag, const std::string& path);

// Exit codes (docs/cli.md): 0 done, 1 other, 2 usage, 3 checkpoint or config, 4 memory, 5 device,
// 6 rank lost.
int exit_code(const Status& status);

// Prints "k3: MESSAGE" to standard error and returns the exit code.
int report(const Status& status);

}  // namespace k3::cli
