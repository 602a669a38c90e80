#include <random>

#include "text_test_util.h"

namespace k3 {
namespace {

using test::json;

std::vector<std::string> pieces_of(std::string_view text) {
  std::vector<std::string> out;
  for (const std::string_view piece : pre_tokenize(text)) out.emplace_back(piece);
  return out;
}
std::string joined(const std::vector<std::string>& pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += piece;
  return text;
}
std::string repeated(std::string_view unit, size_t bytes) {
  std::string text;
  while (text.size() < bytes) text += unit;
  return text;
}
using Pieces = std::vector<std::string>;

TEST(PreTokenizer, SplitsTheGoldenTextsAsTheReferenceDoes) {
  const json cases = test::read_json("tests/text/data/k3_cases.json")["text"];
  ASSERT_EQ(cases.size(), 20U);
  for (const json& c : cases) {
    EXPECT_EQ(pieces_of(c["text"].get<std::string>()), c["pieces"].get<Pieces>()) << c["text"];
  }
}

// 400 random texts over an alphabet of troublemakers, split by an independent backtracking engine.
TEST(PreTokenizer, AgreesWithABacktrackingRegularExpression) {
  const json cases = test::read_json("tests/text/data/pre_tokenizer_cases.json")["pieces"];
  ASSERT_EQ(cases.size(), 400U);
  for (const json& c : cases) {
    const auto want = c.get<Pieces>();
    EXPECT_EQ(pieces_of(joined(want)), want) << c;
  }
}

TEST(PreTokenizer, ContractionsJoinTheirWordInAnyCase) {
  EXPECT_EQ(pieces_of("I'LL"), Pieces({"I'LL"}));
  EXPECT_EQ(pieces_of("we'Re"), Pieces({"we'Re"}));
  EXPECT_EQ(pieces_of("a'\u017f"), Pieces({"a'\u017f"}));  // case folding: long s is an s
  EXPECT_EQ(pieces_of("a'x"), Pieces({"a", "'x"}));
  EXPECT_EQ(pieces_of("a'l"), Pieces({"a", "'l"}));
}

TEST(PreTokenizer, UpperCaseRunsBackUpToTheLastLetterOfBothCases) {
  EXPECT_EQ(pieces_of("HTTPServer"), Pieces({"HTTPServer"}));
  EXPECT_EQ(pieces_of("getElement"), Pieces({"get", "Element"}));
  // U* takes A, mark, B, C; L+ needs one of its own and finds the mark.
  EXPECT_EQ(pieces_of("A\u0301BC"), Pieces({"A\u0301", "BC"}));
  // The mark may lead a word, but then nothing is left for L+: it is a word alone.
  EXPECT_EQ(pieces_of("\u0301BC"), Pieces({"\u0301", "BC"}));
  EXPECT_EQ(pieces_of("!\u0301BC"), Pieces({"!\u0301", "BC"}));
}

TEST(PreTokenizer, HanIsAWordOfItsOwnByScript) {
  EXPECT_EQ(pieces_of("a你好b"), Pieces({"a", "你好", "b"}));
  EXPECT_EQ(pieces_of("你、好"), Pieces({"你", "、", "好"}));  // U+3001 is Common
  EXPECT_EQ(pieces_of("12\u3007"), Pieces({"12\u3007"}));      // a number as well as Han
  EXPECT_EQ(pieces_of("\u3007"
                      "12"),
            Pieces({"\u3007", "12"}));
}

TEST(PreTokenizer, HindiKeepsItsMarksInTheWord) {
  EXPECT_EQ(pieces_of("हिन्दी भाषा"), Pieces({"हिन्दी", " भाषा"}));
}

TEST(PreTokenizer, SpaceLeavesOneForTheNextWord) {
  EXPECT_EQ(pieces_of("a   b"), Pieces({"a", "  ", " b"}));
  EXPECT_EQ(pieces_of("a   "), Pieces({"a", "   "}));
  EXPECT_EQ(pieces_of("a \n \n  b"), Pieces({"a", " \n \n", " ", " b"}));
  EXPECT_EQ(pieces_of("!\r\n\n x"), Pieces({"!\r\n\n", " x"}));
  EXPECT_EQ(pieces_of("a  !"), Pieces({"a", " ", " !"}));
}

TEST(PreTokenizer, PiecesJoinToTheInputWhateverItsBytes) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::string text(random() % 64, '\0');
    for (char& c : text) c = static_cast<char>(random() % (round % 2 == 0 ? 256 : 128));
    const Pieces pieces = pieces_of(text);
    EXPECT_EQ(joined(pieces), text);
    for (const std::string& piece : pieces) EXPECT_FALSE(piece.empty());
  }
}

TEST(PreTokenizer, BytesThatAreNotUtf8StandAsSymbols) {
  EXPECT_EQ(pieces_of("a\xff\xfe"), Pieces({"a", "\xff\xfe"}));
  EXPECT_EQ(pieces_of("\xe4\xbd"), Pieces({"\xe4\xbd"}));  // a cut character
  EXPECT_EQ(pieces_of("1\xc3"), Pieces({"1", "\xc3"}));
}

TEST(PreTokenizer, LongRunsAreCutAtTwentyFiveThousandCharacters) {
  const std::string word(60'000, 'x');
  const Pieces pieces = pieces_of(word);
  ASSERT_EQ(pieces.size(), 3U);
  EXPECT_EQ(pieces[0].size(), 25'000U);
  EXPECT_EQ(pieces[1].size(), 25'000U);
  EXPECT_EQ(pieces[2].size(), 10'000U);
  // Characters, not bytes; and exactly the limit is not cut.
  EXPECT_EQ(pieces_of(repeated("é", 50'000)).size(), 1U);
  EXPECT_EQ(pieces_of(repeated("é", 50'002)).size(), 2U);
  // At a cut the rule for the last space sees the end of its slice.
  const Pieces spaces = pieces_of(std::string(25'001, ' ') + "x");
  EXPECT_EQ(spaces, Pieces({std::string(25'000, ' '), " x"}));
}

TEST(PreTokenizer, SlicesOfFourHundredThousandCharactersAreSplitAlone) {
  // 80,000 times "abcd " is one slice to the character; the word after it is cut at the border.
  std::string text = repeated("abcd ", 399'995) + "wxyzv";
  ASSERT_EQ(text.size(), 400'000U);
  text += "uts rest";
  const Pieces pieces = pieces_of(text);
  EXPECT_EQ(joined(pieces), text);
  ASSERT_GE(pieces.size(), 3U);
  EXPECT_EQ(pieces[pieces.size() - 3], " wxyzv");
  EXPECT_EQ(pieces[pieces.size() - 2], "uts");
  EXPECT_EQ(pieces[pieces.size() - 1], " rest");
}

// A quadratic scan of any of these would take hours; no clock is needed to notice.
TEST(PreTokenizer, HostileMegabytesAreScannedInLinearTime) {
  for (const std::string_view unit :
       {" ", "a", "A", "\u0301", "'", "!", "1", "\n", "\r\n ", "你", "A\u0301", "a'", "'s", "\xff",
        "\xe4\xbd", " \t", "Aa", "\u01c5", "!A"}) {
    const std::string text = repeated(unit, 4'000'000);
    size_t total = 0;
    for (const std::string_view piece : pre_tokenize(text)) total += piece.size();
    EXPECT_EQ(total, text.size());
  }
}

}  // namespace
}  // namespace k3
