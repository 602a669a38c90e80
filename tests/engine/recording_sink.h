// A sink that keeps what it was sent and checks the order of the calls.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/engine.h"
#include "engine/request.h"
#include "fake_executor.h"

namespace k3 {

class RecordingSink : public TokenSink {
 public:
  bool on_token(const TokenOutput& token) override {
    std::unique_lock lock(mutex_);
    if (num_finishes_ > 0) out_of_order_ = true;
    tokens_.push_back(token.token);
    outputs_.push_back(token);
    outputs_.back().top = {};
    tops_.emplace_back(token.top.begin(), token.top.end());
    lock.unlock();
    changed_.notify_all();
    return hook ? hook(token) : true;
  }
  void on_finish(const FinishInfo& info) override {
    {
      std::lock_guard lock(mutex_);
      ++num_finishes_;
      finish_ = info;
    }
    changed_.notify_all();
    if (finish_hook) finish_hook(info);
  }

  std::function<bool(const TokenOutput&)> hook;  // set before submit
  std::function<void(const FinishInfo&)> finish_hook;

  std::vector<int32_t> tokens() const { return locked(tokens_); }
  std::vector<TokenOutput> outputs() const { return locked(outputs_); }
  std::vector<std::vector<TokenLogprob>> tops() const { return locked(tops_); }
  FinishInfo finish() const { return locked(finish_); }
  int num_finishes() const { return locked(num_finishes_); }
  bool finished() const { return num_finishes() > 0; }
  bool out_of_order() const { return locked(out_of_order_); }

  // For tests with a thread; false after ten seconds.
  bool wait_finished() {
    return wait([this] { return num_finishes_ > 0; });
  }
  bool wait_tokens(size_t n) {
    return wait([this, n] { return tokens_.size() >= n; });
  }

 private:
  template <typename T>
  T locked(const T& value) const {
    std::lock_guard lock(mutex_);
    return value;
  }
  template <typename Predicate>
  bool wait(Predicate done) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::seconds(10),
                               done);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int32_t> tokens_;
  std::vector<TokenOutput> outputs_;
  std::vector<std::vector<TokenLogprob>> tops_;
  FinishInfo finish_;
  int num_finishes_ = 0;
  bool out_of_order_ = false;
};

// Sizes small enough that every limit is met.
inline ExecutorLimits small_limits() {
  return {.num_slots = 8,
          .max_rows = 128,
          .max_logit_rows = 8,
          .num_pages = 64,
          .max_positions = 2048,
          .vocab_size = 256};
}

inline constexpr int32_t kEndId = 255;

inline EngineOptions small_options() {
  EngineOptions options;
  options.end_token_ids = {kEndId};
  options.seed = 1;
  options.clock = [] { return 0.0; };
  return options;
}

// A prompt of `size` tokens that depends on `salt`.
inline std::vector<int32_t> make_prompt(int64_t size, uint64_t salt, int32_t vocab = 256) {
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < size; ++i) {
    prompt.push_back(static_cast<int32_t>(mix(salt * 1000003 + static_cast<uint64_t>(i)) %
                                          static_cast<uint64_t>(vocab)));
  }
  return prompt;
}

// A greedy request that only its length ends.
inline Request make_request(int64_t prompt_size, int64_t max_tokens, uint64_t salt) {
  Request request;
  request.prompt = make_prompt(prompt_size, salt);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  request.sink = std::make_shared<RecordingSink>();
  return request;
}

inline RecordingSink& sink_of(const Request& request) {
  return static_cast<RecordingSink&>(*request.sink);
}

// Steps until nothing is left; false on an error or after `max_steps`.
inline bool run_to_end(Engine* engine, int64_t max_steps = 100000) {
  for (int64_t i = 0; i < max_steps; ++i) {
    const Result<bool> more = engine->step();
    if (!more.ok()) return false;
    if (!*more) return true;
  }
  return false;
}

// The greedy continuation, straight from the fake model: no engine, no sampler.
inline std::vector<int32_t> greedy_by_hand(const std::vector<int32_t>& prompt, int64_t n,
                                           int64_t vocab = 256) {
  uint64_t history = kEmptyHistory;
  for (int32_t token : prompt) history = extend(history, token);
  std::vector<int32_t> out;
  std::vector<float> row(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < n; ++i) {
    fake_logits(history, row);
    const auto best = std::max_element(row.begin(), row.end()) - row.begin();
    out.push_back(static_cast<int32_t>(best));
    history = extend(history, out.back());
  }
  return out;
}

}  // namespace k3
