#include "cli/ranks.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <limits>
#include <thread>

#include "cli/args.h"

namespace k3::cli {

Ranks::Ranks(const LoadedModel& m) : mpi_(m.mpi) {
  std::vector<std::unique_ptr<FrontEnd>> ranks;
  for (const auto& executor : m.executors) {
    ranks.push_back(std::make_unique<EngineLoop>(executor.get(), m.engine));
  }
  if (mpi_ != nullptr) {
    const FrontEnd* local = ranks.front().get();
    for (int64_t r = 1; r < mpi_->shape().world; ++r) {
      auto rank = std::make_unique<RemoteRank>(
          local, [mpi = mpi_, r](const std::string& message) { mpi->send(r, message); });
      remote_.push_back(rank.get());
      ranks.push_back(std::move(rank));
    }
    mpi_->on_message([this](int64_t from, const std::string& message) {
      remote_[static_cast<size_t>(from - 1)]->receive(message);
    });
    mpi_->on_failure([this](const Status& status) {
      for (RemoteRank* rank : remote_) rank->fail(status);
    });
  }
  router_ = std::make_unique<RankRouter>(std::move(ranks));
}

Ranks::~Ranks() {
  router_->drain(0);
  if (mpi_ == nullptr) return;
  mpi_->on_message({});
  mpi_->on_failure({});
}

std::vector<std::unique_ptr<EngineLoop>> idle_ranks(const LoadedModel& m) {
  std::vector<std::unique_ptr<EngineLoop>> loops;
  for (size_t r = 1; r < m.executors.size(); ++r) {
    loops.push_back(std::make_unique<EngineLoop>(m.executors[r].get(), m.engine));
  }
  return loops;
}

bool led_by_rank_0(const LoadedModel& m) { return m.mpi != nullptr && m.mpi->rank() != 0; }

Status follow_rank_0(const LoadedModel& m) {
  EngineOptions options = m.engine;
  options.max_queue = std::numeric_limits<int64_t>::max();  // as RankServer asks
  EngineLoop loop(&m.executor(), options);
  RankServer server(&loop, [&m](const std::string& message) { m.mpi->send(0, message); });
  m.mpi->on_message([&server](int64_t, const std::string& message) { server.receive(message); });
  while (!m.mpi->wait_for_goodbye(0, 1)) server.report();
  m.mpi->on_message({});
  report_group_failure(m, m.mpi->failure());
  return m.mpi->failure();
}

void report_group_failure(const LoadedModel& m, const Status& health) {
  if (health.ok() || !m.ep || !m.ep->failed()) return;
  for (const auto& executor : m.executors) {
    std::fprintf(stderr, "%s: the group is lost: %s\n", executor->description().c_str(),
                 health.message().c_str());
  }
  // Whoever is stuck inside a step cannot be joined; nobody waits for it longer than this.
  std::thread([code = exit_code(health)] {
    std::this_thread::sleep_for(std::chrono::seconds(5));
    _exit(code);
  }).detach();
}

}  // namespace k3::cli
