// k3-nano's tokenizer, and ids written as the text they spell.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace k3::testing {

inline constexpr int64_t kNanoVocab = 2048;

inline std::shared_ptr<const Tokenizer> nano_tokenizer() {
  static const std::shared_ptr<const Tokenizer> tokenizer = [] {
    auto loaded = Tokenizer::load(K3_SOURCE_DIR "/models/k3-nano", kNanoVocab);
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    return loaded.ok() ? std::move(loaded).value() : nullptr;
  }();
  return tokenizer;
}

// "<|close|>" and its kin become control tokens, the rest ordinary ones.
inline std::vector<int32_t> ids_of(const std::string& text) {
  return nano_tokenizer()->encode_with_special(text);
}

}  // namespace k3::testing
