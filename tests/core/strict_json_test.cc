#include "core/strict_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace k3 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string error_of(std::string_view text, int depth = 16) {
  const auto r = parse_strict_json(text, "file", depth);
  if (r.ok()) return "(accepted)";
  EXPECT_EQ(r.status().code(), ErrorCode::kCheckpoint);
  return r.status().message();
}

TEST(StrictJson, ReadsWhatTheLibraryReads) {
  const char* text = R"({"a":[1,-2,3.5,true,null,"x",{}],"b":{"c":[[]]}})";
  const auto r = parse_strict_json(text, "file");
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(*r, nlohmann::json::parse(text));
}

TEST(StrictJson, DuplicateNamesAreRefusedAtAnyDepth) {
  EXPECT_THAT(error_of(R"({"a":1,"a":1})"), HasSubstr("the name \"a\" appears twice"));
  EXPECT_THAT(error_of(R"({"x":[{"b":1,"c":2,"b":3}]})"), HasSubstr("\"b\" appears twice"));
  EXPECT_EQ(error_of(R"({"a":{"a":1},"b":{"a":1}})"), "(accepted)");
}

TEST(StrictJson, NulAndByteOrderMarkAreNotJson) {
  EXPECT_THAT(error_of(std::string("{}\0junk", 7)), HasSubstr("at byte 2: a NUL byte"));
  EXPECT_THAT(error_of(std::string("{\"a\":\"\0\"}", 9)), HasSubstr("at byte 6: a NUL byte"));
  EXPECT_THAT(error_of("\xef\xbb\xbf{}"), HasSubstr("at byte 0: a byte order mark"));
}

TEST(StrictJson, DepthBombsAreRefusedWithoutStack) {
  EXPECT_EQ(error_of("[[[]]]", 3), "(accepted)");
  EXPECT_THAT(error_of("[[[[]]]]", 3), HasSubstr("nested deeper than 3 levels"));
  EXPECT_THAT(error_of(std::string(10'000'000, '[')), HasSubstr("nested deeper than 16"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(error_of(objects), HasSubstr("nested deeper than 16"));
}

TEST(StrictJson, NanInfinityAndHugeNumbersAreRefused) {
  for (const char* text : {"NaN", "{\"a\": NaN}", "{\"a\": -Infinity}", "{\"a\": 1e999}"}) {
    EXPECT_THAT(error_of(text), AllOf(HasSubstr("file: not JSON"), HasSubstr("byte"))) << text;
  }
}

TEST(StrictJson, BrokenTextIsRefused) {
  for (const char* text : {"", "{", "{\"a\"}", "[1,]", "{} x", "{'a':1}", "\"\xff\"", "// c\n1"}) {
    EXPECT_THAT(error_of(text), HasSubstr("file: not JSON")) << text;
  }
}

TEST(StrictJson, LongValuesAreCutInMessages) {
  EXPECT_EQ(describe_json("ab"), "\"ab\"");
  EXPECT_LT(describe_json(std::string(10'000, 'a')).size(), 80u);
}

}  // namespace
}  // namespace k3
