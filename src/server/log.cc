#include "server/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

namespace k3 {

spdlog::logger& server_log() {
  static const std::shared_ptr<spdlog::logger> logger = spdlog::stderr_color_mt("k3-server");
  return *logger;
}

}  // namespace k3
