// Every reason to refuse a request before it costs anything.
#pragma once

#include "core/status.h"
#include "engine/engine.h"
#include "engine/request.h"
#include "executor/executor.h"

namespace k3 {

// kInvalidArgument with a message that starts with the field's name and gives the value found and
// the range expected. Safe for any value of any field (max_tokens up to INT64_MAX, NaN). `options`
// are the resolved ones (Engine::options).
Status validate_request(const Request& request, const EngineOptions& options,
                        const ExecutorLimits& limits);

}  // namespace k3
