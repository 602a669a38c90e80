// JSON that comes from files nobody vouches for: bounded in size and depth, each name once, UTF-8
// only, no NaN. One Status says what is wrong and where.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/status.h"

namespace k3 {

// Errors: kCheckpoint, message starting with `origin`. Nesting deeper than `max_depth` is refused
// while reading, so a bomb costs no stack and no memory.
Result<nlohmann::json> parse_strict_json(std::string_view text, const std::string& origin,
                                         int max_depth = 16);

// A value as it may stand in a message: its JSON, cut to a readable length.
std::string describe_json(const nlohmann::json& value);

// Whole file as text. Errors (kCheckpoint): missing, unreadable, larger than `max_bytes`, empty, or
// a Git LFS pointer instead of the file itself.
Result<std::string> read_text_file(const std::string& path, int64_t max_bytes);

// True for the short text file that stands in for a large one when it was not fetched by Git LFS.
bool is_lfs_pointer(std::string_view file_begin);

}  // namespace k3
