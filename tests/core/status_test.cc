// Status, Result and the macros that pass errors on.
#include "core/status.h"

#include <gtest/gtest.h>

#include <memory>

namespace k3 {
namespace {

Result<int> half(int x) {
  if (x % 2 != 0) return invalid_argument("half of ", x, ": odd, expected even");
  return x / 2;
}
Result<int> quarter(int x) {
  K3_ASSIGN_OR_RETURN(const int h, half(x));
  K3_ASSIGN_OR_RETURN(const int q, half(h));
  return q;
}
Status check(int x) {
  K3_RETURN_IF_ERROR(quarter(x).status());
  return {};
}

TEST(Status, DefaultIsOkAndHasNoMessage) {
  const Status s;
  EXPECT_TRUE(s.ok());
  EXPECT_EQ(s.code(), ErrorCode::kOk);
  EXPECT_EQ(s.message(), "");
  EXPECT_TRUE(Status::ok_status().ok());
}

TEST(Status, CarriesCodeAndMessage) {
  const Status s = checkpoint_error("tensor ", "a.b", ": shape [", 3, "], expected [", 4, "]");
  EXPECT_FALSE(s.ok());
  EXPECT_EQ(s.code(), ErrorCode::kCheckpoint);
  EXPECT_EQ(s.message(), "tensor a.b: shape [3], expected [4]");
  EXPECT_EQ(invalid_argument("x").code(), ErrorCode::kInvalidArgument);
}

TEST(Result, IsAValueOrTheReasonWhyNot) {
  const Result<int> good = half(8);
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(*good, 4);
  EXPECT_TRUE(good.status().ok());
  const Result<int> bad = half(7);
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(bad.status().message(), "half of 7: odd, expected even");
}

TEST(Result, MacrosReturnTheFirstErrorAndNothingElse) {
  EXPECT_EQ(*quarter(12), 3);
  EXPECT_EQ(quarter(3).status().message(), "half of 3: odd, expected even");
  EXPECT_EQ(quarter(6).status().message(), "half of 3: odd, expected even");
  EXPECT_TRUE(check(4).ok());
  EXPECT_EQ(check(6).message(), "half of 3: odd, expected even");
}

TEST(Result, HoldsAndGivesUpAMoveOnlyValue) {
  Result<std::unique_ptr<int>> r(std::make_unique<int>(5));
  ASSERT_TRUE(r.ok());
  **r = 6;
  const std::unique_ptr<int> taken = std::move(r).value();
  EXPECT_EQ(*taken, 6);
}

TEST(Result, OfAStringIsTheStringAndNotAnError) {
  const Result<std::string> r(std::string("text"));
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->size(), 4u);
}

}  // namespace
}  // namespace k3
