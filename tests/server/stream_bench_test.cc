// How many streams the server carries: docs/decisions/http-library.md. Not part of a test run:
//   test_server --gtest_also_run_disabled_tests --gtest_filter='StreamBench.*'
// The client is another process, so that memory and threads are the server's alone.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <fstream>

#include "engine/engine_loop.h"
#include "fake_executor.h"
#include "http_client.h"
#include "nano.h"
#include "server/server.h"

namespace k3 {
namespace {

using testing::FakeExecutor;

constexpr int kTokens = 128;

struct Outcome {
  int64_t frames = 0, done = 0, bytes = 0;
  double seconds = 0, first = 0;  // first: when the last stream had its first byte
};

// Opens `streams` connections, asks on each, reads them all to the end.
Outcome read_streams(uint16_t port, int streams) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const int poll = epoll_create1(0);
  std::vector<int> fds;
  const std::string body = R"({"prompt":"a","max_tokens":)" + std::to_string(kTokens) +
                           R"(,"temperature":0,"ignore_eos":true,"stream":true})";
  const std::string request =
      "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
      "Content-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body;
  for (int i = 0; i < streams; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return {};
    fds.push_back(fd);
  }
  Outcome out;
  const auto start = std::chrono::steady_clock::now();
  auto now = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (int i = 0; i < streams; ++i) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = static_cast<uint32_t>(i);
    epoll_ctl(poll, EPOLL_CTL_ADD, fds[static_cast<size_t>(i)], &event);
    if (send(fds[static_cast<size_t>(i)], request.data(), request.size(), 0) < 0) return {};
  }
  std::vector<std::string> tails(static_cast<size_t>(streams));
  int begun = 0;
  while (out.done < streams) {
    epoll_event events[256];
    const int n = epoll_wait(poll, events, 256, 30000);
    if (n <= 0) break;
    for (int k = 0; k < n; ++k) {
      const size_t i = events[k].data.u32;
      char data[65536];
      const ssize_t got = recv(fds[i], data, sizeof data, MSG_DONTWAIT);
      if (got <= 0) continue;
      out.bytes += got;
      std::string& text = tails[i];
      if (text.empty() && ++begun == streams) out.first = now();
      const size_t seen = std::min<size_t>(text.size(), 16);
      text.erase(0, text.size() - seen);
      text.append(data, static_cast<size_t>(got));
      for (size_t at = 0; (at = text.find("data: {", at)) != std::string::npos; ++at) {
        if (at + 7 > seen) ++out.frames;
      }
      const size_t end = text.find("[DONE]");
      if (end != std::string::npos && end + 6 > seen) ++out.done;
    }
  }
  out.seconds = now();
  return out;
}

std::string status_line(const std::string& key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key, 0) == 0) return line;
  }
  return "";
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

TEST(StreamBench, DISABLED_TokensDeliveredAt256And2000Streams) {
  spdlog::set_level(spdlog::level::warn);
  for (int streams : {256, 2000}) {
    int to_client[2], from_client[2];
    ASSERT_EQ(pipe(to_client), 0);
    ASSERT_EQ(pipe(from_client), 0);
    const pid_t child = fork();  // before there are threads
    if (child == 0) {
      uint16_t port = 0;
      if (read(to_client[0], &port, sizeof port) != sizeof port) _exit(1);
      const Outcome outcome = read_streams(port, streams);
      _exit(write(from_client[1], &outcome, sizeof outcome) == sizeof outcome ? 0 : 1);
    }
    {
      const std::vector<int32_t> words = testing::ids_of(" Paris is the capital of France.");
      FakeExecutor executor(
          streams, testing::kNanoVocab,
          [&](const std::vector<int32_t>&, size_t at) { return words[at % words.size()]; });
      EngineOptions engine;
      engine.max_model_len = 1024;
      engine.max_num_seqs = streams;
      engine.max_num_batched_tokens = executor.limits().max_rows;
      engine.max_queue = 4096;
      engine.end_token_ids = {1794};
      ServerOptions options;
      options.http.port = 0;
      options.served_model_names = {"nano"};
      Server server(options);
      ASSERT_TRUE(server.start().ok());
      EngineLoop loop(&executor, engine);
      ModelContext context;
      context.engine = &loop;
      context.tokenizer = testing::nano_tokenizer();
      context.vocab_size = testing::kNanoVocab;
      context.max_model_len = 1024;
      server.set_ready(context);
      const std::string before = status_line("VmRSS");
      const double cpu = cpu_seconds();
      const uint16_t port = server.port();
      ASSERT_EQ(write(to_client[1], &port, sizeof port), static_cast<ssize_t>(sizeof port));
      Outcome o;
      ASSERT_EQ(read(from_client[0], &o, sizeof o), static_cast<ssize_t>(sizeof o));
      EXPECT_EQ(o.done, streams);
      std::printf(
          "streams %d: %lld frames, %.0f frames/s, %.1f MB/s, %.2f s (all begun after %.2f s), "
          "server "
          "cpu %.2f s, steps %lld\n  before %s\n  after  %s, %s, %s\n",
          streams, static_cast<long long>(o.frames), static_cast<double>(o.frames) / o.seconds,
          static_cast<double>(o.bytes) / o.seconds / 1e6, o.seconds, o.first, cpu_seconds() - cpu,
          static_cast<long long>(executor.steps), before.c_str(), status_line("VmRSS").c_str(),
          status_line("VmHWM").c_str(), status_line("Threads").c_str());
      server.stop(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
  }
}

}  // namespace
}  // namespace k3
