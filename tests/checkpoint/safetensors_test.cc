#include "checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint_fixture.h"

namespace k3 {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TempDir;

json two_tensors() {
  return {{"a", {{"dtype", "F32"}, {"shape", {2, 3}}, {"data_offsets", {0, 24}}}},
          {"b", {{"dtype", "BF16"}, {"shape", {4}}, {"data_offsets", {24, 32}}}}};
}

Result<SafetensorsHeader> parse(const std::string& header, int64_t payload = 32) {
  return parse_safetensors_header(header, 8 + static_cast<int64_t>(header.size()) + payload, "f");
}
std::string error_of(const std::string& header, int64_t payload = 32) {
  const auto r = parse(header, payload);
  if (r.ok()) return "(accepted)";
  EXPECT_EQ(r.status().code(), ErrorCode::kCheckpoint);
  return r.status().message();
}
std::string error_of_edit(const std::function<void(json&)>& edit, int64_t payload = 32) {
  json header = two_tensors();
  edit(header);
  return error_of(header.dump(), payload);
}

TEST(SafetensorsHeader, GivesNamesShapesAndFileOffsets) {
  json header = two_tensors();
  header["__metadata__"] = {{"format", "pt"}};
  const std::string text = header.dump() + "   ";
  const auto r = parse(text);
  ASSERT_TRUE(r.ok()) << r.status().message();
  ASSERT_EQ(r->tensors.size(), 2u);
  EXPECT_EQ(r->payload_begin, 8 + static_cast<int64_t>(text.size()));
  EXPECT_EQ(r->tensors[0].name, "a");
  EXPECT_EQ(r->tensors[0].dtype, "F32");
  EXPECT_EQ(r->tensors[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(r->tensors[1].begin, r->payload_begin + 24);
  EXPECT_EQ(r->tensors[1].end, r->payload_begin + 32);
}

TEST(SafetensorsHeader, AcceptsScalarsAndEmptyTensors) {
  const json header = {
      {"s", {{"dtype", "F64"}, {"shape", json::array()}, {"data_offsets", {0, 8}}}},
      {"e", {{"dtype", "U8"}, {"shape", {0, 5}}, {"data_offsets", {8, 8}}}}};
  EXPECT_EQ(error_of(header.dump(), 8), "(accepted)");
}

TEST(SafetensorsHeader, OverlapsAreRefused) {
  EXPECT_THAT(error_of_edit(
                  [](json& h) {
                    h["b"]["data_offsets"] = {20, 28};
                  },
                  28),
              HasSubstr("tensor b overlaps tensor a"));
}

TEST(SafetensorsHeader, HolesAreRefused) {
  EXPECT_THAT(error_of_edit(
                  [](json& h) {
                    h["b"]["data_offsets"] = {26, 34};
                  },
                  34),
              HasSubstr("2 bytes before tensor b belong to no tensor"));
}

TEST(SafetensorsHeader, TrailingBytesAreRefused) {
  EXPECT_THAT(error_of(two_tensors().dump(), 40),
              HasSubstr("8 bytes behind the last tensor belong to no tensor"));
}

TEST(SafetensorsHeader, OffsetsBeyondTheFileAreRefused) {
  EXPECT_THAT(error_of(two_tensors().dump(), 31),
              AllOf(HasSubstr("tensor b"), HasSubstr("found end 32, but the file holds 31")));
}

TEST(SafetensorsHeader, BeginAfterEndIsRefused) {
  EXPECT_THAT(error_of_edit([](json& h) {
                h["b"]["data_offsets"] = {32, 24};
              }),
              HasSubstr("expected begin <= end"));
}

TEST(SafetensorsHeader, SizeMustBeShapeTimesDtype) {
  EXPECT_THAT(error_of_edit([](json& h) {
                h["a"]["shape"] = {2, 4};
              }),
              HasSubstr("tensor a: data_offsets: found 24 bytes, expected 32 for shape [2,4]"));
  EXPECT_THAT(error_of_edit([](json& h) { h["b"]["dtype"] = "F32"; }), HasSubstr("expected 16"));
}

TEST(SafetensorsHeader, UnknownDtypesAreNamed) {
  EXPECT_THAT(error_of_edit([](json& h) { h["b"]["dtype"] = "Q7"; }),
              HasSubstr("tensor b: dtype: found \"Q7\", which is no dtype of the safetensors"));
  EXPECT_THAT(error_of_edit([](json& h) { h["b"]["dtype"] = 3; }), HasSubstr("expected a string"));
}

TEST(SafetensorsHeader, ShapeArithmeticDoesNotOverflow) {
  const int64_t big = int64_t{1} << 31;
  EXPECT_THAT(error_of_edit([&](json& h) {
                h["a"]["shape"] = {big, big, 4};
              }),
              HasSubstr("which overflows"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"]["shape"] = {INT64_MAX}; }),
              HasSubstr("which overflows"));
  EXPECT_THAT(error_of_edit([](json& h) {
                h["a"]["data_offsets"] = {0, INT64_MAX};
              }),
              HasSubstr("expected 24"));
  EXPECT_THAT(error_of_edit([](json& h) {
                h["a"]["data_offsets"] = {0, UINT64_MAX};
              }),
              HasSubstr("expected [begin, end]"));
}

TEST(SafetensorsHeader, WrongJsonTypesAreRefused) {
  EXPECT_THAT(error_of_edit([](json& h) { h["a"] = 5; }), HasSubstr("expected an object"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"].erase("shape"); }), HasSubstr("missing shape"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"].erase("dtype"); }), HasSubstr("missing dtype"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"].erase("data_offsets"); }),
              HasSubstr("missing data_offsets"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"]["shape"] = "2x3"; }), HasSubstr("shape: found"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"]["shape"] = {2, -3}; }), HasSubstr("non-negative"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"]["shape"] = {2, 3.0}; }), HasSubstr("shape"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"]["shape"] = std::vector<int>(17, 1); }),
              HasSubstr("at most 16 sizes"));
  EXPECT_THAT(error_of_edit([](json& h) { h["a"]["data_offsets"] = {0}; }), HasSubstr("data_off"));
  EXPECT_THAT(error_of_edit([](json& h) {
                h["__metadata__"] = {{"a", 1}};
              }),
              HasSubstr("__metadata__"));
  EXPECT_THAT(error_of("[]"), HasSubstr("does not start with '{'"));
  EXPECT_THAT(error_of(""), HasSubstr("does not start with '{'"));
}

TEST(SafetensorsHeader, DuplicateNamesAreRefused) {
  EXPECT_THAT(error_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                       2),
              HasSubstr("the name \"a\" appears twice"));
}

TEST(SafetensorsHeader, DepthBombsAreRefused) {
  std::string bomb = "{\"a\":";
  for (int i = 0; i < 1'000'000; ++i) bomb += '[';
  EXPECT_THAT(error_of(bomb), HasSubstr("nested deeper than 8"));
}

TEST(SafetensorsFile, EveryWayToBeNoSafetensorsFileHasItsMessage) {
  const TempDir dir;
  const auto error_of_file = [&](const std::string& bytes) {
    testing::write_file(dir.path() / "x.safetensors", bytes);
    const auto r = read_safetensors_header((dir.path() / "x.safetensors").string());
    return r.ok() ? "(accepted)" : r.status().message();
  };
  const std::string good = testing::shard_bytes(two_tensors(), std::string(32, 'x'));
  EXPECT_EQ(error_of_file(good), "(accepted)");
  EXPECT_THAT(error_of_file(""), HasSubstr("x.safetensors: the file is empty"));
  EXPECT_THAT(error_of_file("abc"), HasSubstr("3 bytes, expected at least 8"));
  EXPECT_THAT(error_of_file("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
              HasSubstr("a Git LFS pointer"));
  EXPECT_THAT(error_of_file("PK\x03\x04 a zip archive of tensors"),
              HasSubstr("not a safetensors file?"));
  EXPECT_THAT(error_of_file(good.substr(0, 40)), HasSubstr("but the file has 40 bytes"));
  EXPECT_THAT(error_of_file(good.substr(0, good.size() - 1)), HasSubstr("(truncated?)"));
  EXPECT_THAT(error_of_file(std::string(8, '\0')), HasSubstr("does not start with '{'"));
  std::string long_header = good;
  long_header[3] = '\x06';  // 100,663,296 + ...
  EXPECT_THAT(error_of_file(long_header), HasSubstr("expected at most 100000000"));
  EXPECT_THAT(read_safetensors_header(dir.str()).status().message(), HasSubstr("not a regular"));
  EXPECT_THAT(read_safetensors_header(dir.str() + "/none").status().message(),
              HasSubstr("no such file"));
}

// Cut anywhere, a file is refused, and never by a crash.
TEST(SafetensorsFile, EveryTruncationIsRefused) {
  const TempDir dir;
  const std::string good = testing::shard_bytes(two_tensors(), std::string(32, 'x'));
  for (size_t size = 0; size < good.size(); ++size) {
    testing::write_file(dir.path() / "x.safetensors", good.substr(0, size));
    EXPECT_FALSE(read_safetensors_header((dir.path() / "x.safetensors").string()).ok()) << size;
  }
}

}  // namespace
}  // namespace k3
