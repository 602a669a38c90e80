#include <filesystem>
#include <map>
#include <random>

#include "text_test_util.h"

namespace k3 {
namespace {

using test::json;
using test::nano;

std::string base64(std::string_view bytes) {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k) {
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
    }
    for (size_t k = 0; k < 4; ++k) {
      out += i + k > bytes.size() ? '=' : kAlphabet[(bits >> (18 - 6 * k)) & 63];
    }
  }
  return out;
}
// All bytes, then these tokens.
std::string ranks_file(const std::vector<std::string>& tokens = {}) {
  std::string file;
  for (int b = 0; b < 256; ++b) {
    file += base64(std::string(1, static_cast<char>(b))) + " " + std::to_string(b) + "\n";
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    file += base64(tokens[i]) + " " + std::to_string(256 + i) + "\n";
  }
  return file;
}
std::string error_of(std::string_view ranks, std::string_view config = "{}", int64_t size = 512) {
  const auto parsed = Tokenizer::parse(ranks, config, size);
  if (parsed.ok()) return "no error";
  EXPECT_EQ(parsed.status().code(), ErrorCode::kCheckpoint);
  return parsed.status().message();
}
std::string bytes_of(const Tokenizer& t, const std::vector<int32_t>& ids) {
  std::string out;
  for (const int32_t id : ids) out += t.token_bytes(id);
  return out;
}

TEST(Tokenizer, EncodesNanosPromptsToTheirGoldenIds) {
  const json prompts = test::read_json("tests/data/k3-nano-goldens/prompts.json");
  int seen = 0;
  for (const auto& [name, text] : prompts["prompts"].items()) {
    EXPECT_EQ(nano()->encode(text.get<std::string>()),
              prompts["ids"][name].get<std::vector<int32_t>>())
        << name;
    ++seen;
  }
  EXPECT_EQ(seen, 7);
}

TEST(Tokenizer, EncodesTheGoldenTextsWithTheRealVocabulary) {
  K3_REQUIRE_REAL_VOCABULARY();
  const auto k3 = test::real_k3();
  EXPECT_EQ(k3->num_ranks(), 163584);
  const json cases = test::read_json("tests/text/data/k3_cases.json")["text"];
  for (const json& c : cases) {
    EXPECT_EQ(k3->encode(c["text"].get<std::string>()), c["ids"].get<std::vector<int32_t>>())
        << c["text"];
  }
  EXPECT_EQ(k3->encode("你好世界"), std::vector<int32_t>({33845, 2243}));
  EXPECT_EQ(k3->encode("think"), std::vector<int32_t>({39964}));
  EXPECT_EQ(k3->encode("<think>").size(), 3U);  // in K3 it is no token (H6)
  EXPECT_EQ(k3->encode("<|open|>message"), std::vector<int32_t>({27, 91, 4454, 91, 29, 2778}));
  EXPECT_EQ(k3->encode_with_special("<|open|>message"), std::vector<int32_t>({163587, 2778}));
  EXPECT_EQ(k3->token_bytes(163600), "<|reserved_token_163600|>");
}

TEST(Tokenizer, MergesTheLowestRankFirstAndLeftmostAmongEquals) {
  const auto t = Tokenizer::parse(ranks_file({"bc", "ab", "aa"}), "{}", 512).value();
  EXPECT_EQ(t->encode("xabc"), std::vector<int32_t>({'x', 'a', 256}));  // bc before ab
  EXPECT_EQ(t->encode("aaaaa"), std::vector<int32_t>({258, 258, 'a'}));
  // Once merged, parts merge on; a piece that is a token is found whole.
  const auto more = Tokenizer::parse(ranks_file({"bc", "ab", "abc"}), "{}", 512).value();
  EXPECT_EQ(more->encode("xabc"), std::vector<int32_t>({'x', 258}));
  EXPECT_EQ(more->encode("abc"), std::vector<int32_t>({258}));
}

// The rule itself, as slowly as it reads.
std::vector<int32_t> slow_bpe(const Tokenizer& t, std::string_view piece) {
  std::vector<std::pair<std::string, int32_t>> ranks;
  std::map<std::string, int32_t> rank_of;
  for (int32_t i = 0; i < t.num_ranks(); ++i) rank_of.emplace(t.token_bytes(i), i);
  if (const auto whole = rank_of.find(std::string(piece)); whole != rank_of.end()) {
    return {whole->second};
  }
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  for (;;) {
    int32_t best = INT32_MAX;
    size_t at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto found = rank_of.find(parts[i] + parts[i + 1]);
      if (found != rank_of.end() && found->second < best) {
        best = found->second;
        at = i;
      }
    }
    if (best == INT32_MAX) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  std::vector<int32_t> ids;
  for (const std::string& part : parts) ids.push_back(rank_of.at(part));
  return ids;
}

TEST(Tokenizer, ShortAndLongPiecesMergeAsTheRuleSays) {
  std::mt19937 random(2);
  for (const size_t size : {2, 5, 20, 63, 64, 65, 66, 130, 300}) {
    for (int round = 0; round < 6; ++round) {
      std::string piece(size, ' ');
      const std::string letters = round % 2 == 0 ? "theranisoquc" : "aaaaann";
      for (char& c : piece) c = letters[random() % letters.size()];
      ASSERT_EQ(pre_tokenize(piece).size(), 1U);
      EXPECT_EQ(nano()->encode(piece), slow_bpe(*nano(), piece)) << piece;
    }
  }
}

TEST(Tokenizer, RandomBytesComeBackFromTheirTokens) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    std::string text(random() % 200, '\0');
    for (char& c : text) c = static_cast<char>(random() % 256);
    const auto ids = nano()->encode(text);
    EXPECT_EQ(bytes_of(*nano(), ids), text);
    for (const int32_t id : ids) EXPECT_FALSE(nano()->is_special(id));
  }
}

TEST(Tokenizer, ValidTextSurvivesEncodeAndDecode) {
  const std::string text = "smörgåsbord 🎉 party 数字 हिन्दी e\u0301 <|open|> [BOS]";
  EXPECT_EQ(nano()->decode(nano()->encode(text), true), text);
}

TEST(Tokenizer, SpecialSpellingsAreOrdinaryTextUnlessAskedFor) {
  const auto& m = nano()->markup();
  for (const int32_t id : nano()->encode("[BOS]<|open|>x<|reserved_token_1800|>")) {
    EXPECT_LT(id, 1792);
  }
  const auto ids = nano()->encode_with_special("[BOS]<|open|>x<|reserved_token_1800|><|open|");
  ASSERT_GE(ids.size(), 5U);
  EXPECT_EQ(ids[0], m.bos);
  EXPECT_EQ(ids[1], m.open);
  EXPECT_EQ(ids[2], 'x');
  EXPECT_EQ(ids[3], 1800);
  EXPECT_FALSE(nano()->is_special(ids[4]));
  EXPECT_EQ(bytes_of(*nano(), ids), "[BOS]<|open|>x<|reserved_token_1800|><|open|");
  EXPECT_EQ(nano()->decode(ids, true), "x<|open|");
  EXPECT_EQ(nano()->decode({m.open, 'x'}, false), "<|open|>x");
}

TEST(Tokenizer, NanosSpecialsBeginAt1792) {
  EXPECT_EQ(nano()->num_ranks(), 1792);
  EXPECT_EQ(nano()->vocab_size(), 2048);
  EXPECT_EQ(nano()->markup().bos, 1792);
  EXPECT_EQ(nano()->markup().eos, 1793);
  EXPECT_EQ(nano()->markup().end_of_msg, 1794);
  EXPECT_EQ(nano()->markup().open, 1795);
  EXPECT_EQ(nano()->markup().close, 1796);
  EXPECT_EQ(nano()->markup().sep, 1797);
  EXPECT_EQ(nano()->token_bytes(1803), "<|reserved_token_1803|>");
  EXPECT_EQ(nano()->special_id("[PAD]"), 2047);
  EXPECT_EQ(nano()->special_id("<think>"), std::nullopt);
  EXPECT_TRUE(nano()->is_special(1792));
  EXPECT_FALSE(nano()->is_special(1791));
  EXPECT_EQ(nano()->token_bytes(-1), "");
  EXPECT_EQ(nano()->token_bytes(2048), "");
}

TEST(Tokenizer, HostileMegabytesAreEncoded) {
  for (const std::string_view unit : {" ", "a", "A", "\u0301", "'", "0", "\n", "é", "abcdefghij"}) {
    std::string text;
    while (text.size() < 1'000'000) text += unit;
    EXPECT_EQ(bytes_of(*nano(), nano()->encode(text)), text);
  }
  std::string almost;
  while (almost.size() < 1'000'000) almost += "<|reserved_token_";
  EXPECT_EQ(bytes_of(*nano(), nano()->encode_with_special(almost)), almost);
}

TEST(Tokenizer, EmptyTextHasNoTokens) {
  EXPECT_TRUE(nano()->encode("").empty());
  EXPECT_TRUE(nano()->encode_with_special("").empty());
  EXPECT_EQ(nano()->decode({}, false), "");
}

TEST(TokenizerFile, BadLinesAreRefusedByNumber) {
  const std::string good = ranks_file();
  EXPECT_EQ(error_of(good), "no error");
  EXPECT_EQ(error_of(good + "\r\n"), "no error");
  const auto refused = [&good](const std::string& line, const std::string& why) {
    const std::string message = error_of(good + line + "\n");
    EXPECT_NE(message.find("line 257"), std::string::npos) << message;
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  refused("YWI=", "expected base64");      // no rank
  refused("YW?= 256", "expected base64");  // not the alphabet
  refused("YWI 256", "expected base64");   // not padded
  refused("YWJ= 256", "expected base64");  // bits under the padding
  refused(" 256", "expected base64");      // no token
  refused("YWI= 2x6", "rank \"2x6\"");
  refused("YWI= -1", "rank \"-1\"");
  refused("YWI= ", "rank \"\"");
  refused("YWI= 99999999999", "rank \"99999999999\"");
  refused("YWI= 255", "was given before, on line 256");
  refused("YQ== 256", "is also that of rank 97, on line 98");
  refused("YWI= 258", "rank 258");  // a gap
  refused("YWI= 512", "beyond vocab_size 512");
  refused("YWI= 400", "in a file of");
}

TEST(TokenizerFile, EveryByteNeedsARank) {
  std::string file = ranks_file();
  file.resize(file.rfind('\n', file.size() - 2) + 1);
  EXPECT_NE(error_of(file).find("byte 255"), std::string::npos);
  EXPECT_NE(error_of("").find("no tokens"), std::string::npos);
}

TEST(TokenizerFile, AnLfsPointerIsNamedForWhatItIs) {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2795286\n";
  const auto dir = std::filesystem::path(testing::TempDir()) / "k3_tokenizer_lfs";
  std::filesystem::create_directories(dir);
  const auto message = [&dir](const std::string& ranks, const std::string& config) {
    std::ofstream(dir / "tiktoken.model") << ranks;
    std::ofstream(dir / "tokenizer_config.json") << config;
    return Tokenizer::load(dir.string(), 512).status().message();
  };
  EXPECT_NE(message(pointer, "{}").find("tiktoken.model: a Git LFS pointer"), std::string::npos);
  EXPECT_NE(message(ranks_file(), pointer).find("tokenizer_config.json: a Git LFS pointer"),
            std::string::npos);
  EXPECT_EQ(message(ranks_file(), "{}"), "");
}

TEST(TokenizerFile, SpecialTokensMustFitTheirSlots) {
  const std::string ranks = ranks_file();
  const auto refused = [&ranks](const std::string& config, const std::string& why,
                                int64_t size = 512) {
    const std::string message = error_of(ranks, config, size);
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  refused("\xef\xbb\xbf{}", "not JSON at byte 0");
  refused(std::string(1000, '['), "nested deeper than 16");
  refused("[]", "not a JSON object");
  refused("{", "not JSON at byte 2");
  refused(R"({"added_tokens_decoder": {}, "added_tokens_decoder": {}})", "appears twice");
  refused(R"({"added_tokens_decoder": {"258": {"content": "A"}}})", "is the file whole?");
  refused(R"({"added_tokens_decoder": []})", "expected an object");
  refused(R"({"added_tokens_decoder": {"x": {"content": "A"}}})", "not a token id");
  refused(R"({"added_tokens_decoder": {"300": "A"}})", "non-empty string `content`");
  refused(R"({"added_tokens_decoder": {"300": {"content": ""}}})", "non-empty string `content`");
  refused(R"({"added_tokens_decoder": {"255": {"content": "A"}}})", "has the id of a rank");
  refused(R"({"added_tokens_decoder": {"512": {"content": "A"}}})", "beyond vocab_size 512");
  refused(R"({"added_tokens_decoder": {"256": {"content": "A"}, "257": {"content": "A"}}})",
          "are both \"A\"");
  refused(R"({"added_tokens_decoder": {"300": {"content": "A"}, "0300": {"content": "B"}}})",
          "given before");
  refused(R"({"added_tokens_decoder": {"256": {"content": "<|reserved_token_301|>"}}})",
          "are both");
  refused("{}", "do the two belong together", 10'000'000);
  refused("{}", "expected 1 to", 0);
  refused("{}", "beyond vocab_size 100", 100);
}

TEST(TokenizerFile, AVocabularyWithoutMarkupSaysSo) {
  const auto t = Tokenizer::parse(ranks_file(), "{}", 512).value();
  EXPECT_EQ(t->markup().open, -1);
  EXPECT_EQ(t->token_bytes(256), "<|reserved_token_256|>");
}

TEST(TokenizerFile, AMissingFileIsNamed) {
  const auto missing = Tokenizer::load("/nonexistent", 2048);
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), ErrorCode::kCheckpoint);
  EXPECT_NE(missing.status().message().find("/nonexistent/tiktoken.model"), std::string::npos);
}

// --- Utf8Stream ---

std::string through_stream(std::string_view bytes, size_t step) {
  Utf8Stream stream;
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += step) out += stream.push(bytes.substr(i, step));
  return out + stream.flush();
}

TEST(Utf8Stream, NeverSplitsACharacter) {
  const std::string text = "🏳️‍🌈 你好 हिन्दी e\u0301";  // H19
  for (size_t step = 1; step < 8; ++step) EXPECT_EQ(through_stream(text, step), text);
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xe4\xbd"), "a");
  EXPECT_EQ(stream.push("\xa0"), "你");
  EXPECT_EQ(stream.flush(), "");
}

TEST(Utf8Stream, ReplacesEachMaximalInvalidPrefixOnce) {
  const std::string r = "\ufffd";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a\xff"
       "b",
       "a" + r + "b"},
      {"\xe4\xbd"
       "x",
       r + "x"},        // a cut character is one
      {"\xe4\xbd", r},  // also at the end
      {"\xf0\x9f\x8f", r},
      {"\xc0\x80", r + r},                  // overlong: neither byte begins anything
      {"\xed\xa0\x80", r + r + r},          // a surrogate
      {"\xf4\x90\x80\x80", r + r + r + r},  // beyond U+10FFFF
      {"\xf0\x80\x80", r + r + r},
      {"\xe4\xe4\xbd\xa0", r + "你"},
      {"\x80", r}};
  for (const auto& [bytes, want] : cases) {
    for (size_t step = 1; step < 5; ++step) EXPECT_EQ(through_stream(bytes, step), want);
  }
}

TEST(Utf8Stream, CuttingDoesNotChangeTheText) {
  std::mt19937 random(4);
  for (int round = 0; round < 500; ++round) {
    std::string bytes(random() % 40, '\0');
    for (char& c : bytes) {
      c = static_cast<char>(round % 2 == 0 ? random() % 256 : 0x80 + random() % 0x78);
    }
    const std::string whole = through_stream(bytes, 1000);
    for (size_t step = 1; step < 6; ++step) EXPECT_EQ(through_stream(bytes, step), whole);
  }
}

}  // namespace
}  // namespace k3
