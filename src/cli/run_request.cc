#include "cli/run_request.h"

#include <csignal>

namespace k3::cli {
namespace {

void on_interrupt(int) {
  interrupted().store(true);
  std::signal(SIGINT, SIG_DFL);
}

}  // namespace

InterruptGuard::InterruptGuard() {
  interrupted().store(false);
  before_ = std::signal(SIGINT, on_interrupt);
}
InterruptGuard::~InterruptGuard() { std::signal(SIGINT, before_ == SIG_ERR ? SIG_DFL : before_); }

Status run_request(Engine* engine, Request request) {
  InterruptGuard guard;
  K3_ASSIGN_OR_RETURN(const RequestId id, engine->submit(std::move(request)));
  for (;;) {
    if (interrupted().load()) engine->cancel(id);
    K3_ASSIGN_OR_RETURN(const bool more, engine->step());
    if (!more) return {};
  }
}

}  // namespace k3::cli
