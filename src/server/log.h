// The server's log: one line a request, on stderr (stdout belongs to the program's output).
#pragma once

#include <spdlog/spdlog.h>

namespace k3 {

spdlog::logger& server_log();

}  // namespace k3
