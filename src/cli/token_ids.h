// Token ids as text: decimal, separated by blanks.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <istream>
#include <string>
#include <vector>

#include "core/status.h"

namespace k3::cli {

// kInvalidArgument names `origin`, the entry's index, its text and the range expected.
inline Result<std::vector<int32_t>> parse_token_ids(std::istream& in, const std::string& origin,
                                                    int64_t vocab_size) {
  std::vector<int32_t> ids;
  std::string word;
  while (in >> word) {
    char* end = nullptr;
    errno = 0;
    const long long value = std::strtoll(word.c_str(), &end, 10);
    if (errno != 0 || end != word.c_str() + word.size() || value < 0 || value >= vocab_size) {
      return invalid_argument(origin, ": entry ", ids.size(), " is '", word.substr(0, 40),
                              "', expected a token id in [0, ", vocab_size, ")");
    }
    ids.push_back(static_cast<int32_t>(value));
  }
  return ids;
}

}  // namespace k3::cli
