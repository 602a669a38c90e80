#include <random>

#include "text_test_util.h"

namespace k3 {
namespace {

struct Sent {
  std::string text;
  int matched = -1;
};
Sent send(const std::vector<std::string>& stops, std::string_view text, size_t step,
          bool include = false) {
  StopMatcher matcher(stops, include);
  Sent sent;
  for (size_t i = 0; i < text.size(); i += step) sent.text += matcher.push(text.substr(i, step));
  sent.matched = matcher.matched();
  sent.text += matcher.flush();
  return sent;
}

TEST(StopMatcher, StopStringNeverLeaksAByte) {  // H16
  for (size_t step = 1; step < 30; ++step) {
    const Sent sent = send({"DEFGHIJ"}, "ABCDEFGHIJKLM", step);
    EXPECT_EQ(sent.text, "ABC");
    EXPECT_EQ(sent.matched, 0);
  }
}

TEST(StopMatcher, AStopThatNeverComesLosesNothing) {  // H17
  for (size_t step = 1; step < 12; ++step) {
    EXPECT_EQ(send({"world!", "\n\n\n"}, "hello world\n\n", step).text, "hello world\n\n");
  }
}

TEST(StopMatcher, HoldsNoMoreThanMayBegin) {  // H18
  StopMatcher matcher({"abab!"});
  EXPECT_EQ(matcher.push("xyab"), "xy");
  EXPECT_EQ(matcher.push("ab"), "");
  EXPECT_EQ(matcher.push("ab"), "ab");  // abab|ab: the end still matches abab
  EXPECT_EQ(matcher.push("c"), "ababc");
  EXPECT_EQ(matcher.push("!"), "!");
}

TEST(StopMatcher, TheMatchThatEndsFirstWins) {
  EXPECT_EQ(send({"abcdef", "bcd"}, "xabcdef", 1).text, "xa");
  EXPECT_EQ(send({"abcdef", "bcd"}, "xabcdef", 7).text, "xa");
  EXPECT_EQ(send({"abcdef", "bcd"}, "xabcdef", 7).matched, 1);
  // Ending together, the longer takes more away.
  EXPECT_EQ(send({"c", "bc"}, "abc", 3).text, "a");
  EXPECT_EQ(send({"c", "bc"}, "abc", 3).matched, 1);
  EXPECT_EQ(send({"c", "c"}, "abc", 3).matched, 0);
}

TEST(StopMatcher, AtTheVeryStartNothingIsSent) {
  EXPECT_EQ(send({"ab"}, "abc", 1).text, "");
  EXPECT_EQ(send({"ab"}, "abc", 1, true).text, "ab");
}

TEST(StopMatcher, CanIncludeTheStopString) {
  EXPECT_EQ(send({"END"}, "the END of it", 2, true).text, "the END");
}

TEST(StopMatcher, AfterAMatchAllTextIsDropped) {
  StopMatcher matcher({"."});
  EXPECT_EQ(matcher.push("a.b"), "a");
  EXPECT_EQ(matcher.push("c"), "");
  EXPECT_EQ(matcher.flush(), "");
}

TEST(StopMatcher, WithoutStopsTextPasses) {
  EXPECT_EQ(send({}, "abc", 2).text, "abc");
  EXPECT_EQ(send({""}, "abc", 2).text, "abc");
  EXPECT_EQ(send({""}, "abc", 2).matched, -1);
}

TEST(StopMatcher, AgreesWithASearchOfTheWholeTextHoweverItIsCut) {
  std::mt19937 random(6);
  const auto word = [&random](size_t max) {
    std::string text(1 + random() % max, ' ');
    for (char& c : text) c = static_cast<char>('a' + random() % 2);
    return text;
  };
  int matches = 0;
  for (int round = 0; round < 3000; ++round) {
    const std::vector<std::string> stops = {word(7), word(7), word(9)};
    const std::string text = word(30);
    size_t end = std::string::npos;
    size_t size = 0;
    for (const std::string& stop : stops) {
      const size_t at = text.find(stop);
      if (at == std::string::npos) continue;
      const size_t e = at + stop.size();
      if (end == std::string::npos || e < end || (e == end && stop.size() > size)) {
        end = e;
        size = stop.size();
      }
    }
    const std::string want = end == std::string::npos ? text : text.substr(0, end - size);
    matches += end != std::string::npos;
    for (size_t step = 1; step < 6; ++step) ASSERT_EQ(send(stops, text, step).text, want);
  }
  EXPECT_GT(matches, 500);
}

}  // namespace
}  // namespace k3
