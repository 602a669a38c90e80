// Byte-pair merging by rank over one piece of text: the vocabulary's ranks and the merge itself.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

// Maps the bytes of a token to its rank, which is its id. Built once, then read-only.
class RankTable {
 public:
  static constexpr int32_t kNone = INT32_MAX;  // as a rank: later than all

  // tokens[rank] = its bytes. Returns the rank of the first token that repeats an earlier one, or
  // kNone if all differ. The views must outlive the table.
  int32_t build(const std::vector<std::string_view>& tokens);

  int32_t find(std::string_view bytes) const;
  int32_t byte(unsigned char b) const { return bytes_[b]; }  // kNone where it has no rank

  // Appends the ids of `piece` (not empty): the piece's own rank if it has one; else the pair of
  // neighbours with the lowest rank is merged, leftmost first, until no pair has one. Every byte
  // must have a rank. Time O(n log n).
  void encode_piece(std::string_view piece, std::vector<int32_t>* ids) const;

 private:
  struct Slot {
    uint32_t tag = 0;
    int32_t rank = kNone;
  };

  void merge_short(std::string_view piece, std::vector<int32_t>* ids) const;
  void merge_long(std::string_view piece, std::vector<int32_t>* ids) const;

  std::vector<std::string_view> tokens_;
  std::vector<Slot> slots_;  // open addressing, linear probing, at most half full
  size_t mask_ = 0;
  size_t max_size_ = 0;  // of a token, bytes
  std::array<int32_t, 256> bytes_{};
  std::vector<int32_t> pairs_;  // [256 * 256] rank of each two-byte token
};

}  // namespace k3
