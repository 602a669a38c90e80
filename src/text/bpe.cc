#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <queue>

namespace k3 {
namespace {

// Pieces up to this many bytes are merged by scanning an array on the stack (quadratic, but nearly
// every word is a handful of bytes); longer ones with a heap.
constexpr size_t kShortPiece = 64;

uint64_t hash_bytes(std::string_view bytes) {
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15ULL;
  uint64_t h = bytes.size() * kMultiplier;
  const char* p = bytes.data();
  size_t n = bytes.size();
  const auto mix = [&h](uint64_t v) {
    h = (h ^ v) * kMultiplier;
    h ^= h >> 32;
  };
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    mix(v);
  }
  if (n > 0) {
    uint64_t v = 0;
    std::memcpy(&v, p, n);
    mix(v);
  }
  return h ^ (h >> 29);
}

}  // namespace

int32_t RankTable::build(const std::vector<std::string_view>& tokens) {
  tokens_ = tokens;
  slots_.assign(std::bit_ceil(tokens.size() * 2 + 2), Slot{});
  mask_ = slots_.size() - 1;
  bytes_.fill(kNone);
  pairs_.assign(256 * 256, kNone);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view token = tokens[i];
    const auto rank = static_cast<int32_t>(i);
    if (find(token) != kNone) return rank;
    max_size_ = std::max(max_size_, token.size());
    const auto at = [token](size_t k) { return static_cast<unsigned char>(token[k]); };
    if (token.size() == 1) bytes_[at(0)] = rank;
    if (token.size() == 2) pairs_[at(0) * 256 + at(1)] = rank;
    const uint64_t h = hash_bytes(token);
    size_t slot = h & mask_;
    while (slots_[slot].rank != kNone) slot = (slot + 1) & mask_;
    slots_[slot] = {static_cast<uint32_t>(h >> 32), rank};
  }
  return kNone;
}

int32_t RankTable::find(std::string_view bytes) const {
  if (bytes.size() > max_size_) return kNone;
  const uint64_t h = hash_bytes(bytes);
  const auto tag = static_cast<uint32_t>(h >> 32);
  for (size_t slot = h & mask_;; slot = (slot + 1) & mask_) {
    const Slot& s = slots_[slot];
    if (s.rank == kNone) return kNone;
    if (s.tag == tag && tokens_[static_cast<size_t>(s.rank)] == bytes) return s.rank;
  }
}

void RankTable::encode_piece(std::string_view piece, std::vector<int32_t>* ids) const {
  if (const int32_t rank = find(piece); rank != kNone) {
    ids->push_back(rank);
  } else if (piece.size() <= kShortPiece) {
    merge_short(piece, ids);
  } else {
    merge_long(piece, ids);
  }
}

void RankTable::merge_short(std::string_view piece, std::vector<int32_t>* ids) const {
  struct Part {
    uint32_t start;
    int32_t id;
    int32_t pair;  // rank of this part joined with the next
  };
  std::array<Part, kShortPiece + 1> parts;
  size_t count = piece.size();
  const auto at = [piece](size_t i) { return static_cast<unsigned char>(piece[i]); };
  for (size_t i = 0; i < count; ++i) {
    const int32_t pair = i + 1 < count ? pairs_[at(i) * 256 + at(i + 1)] : kNone;
    parts[i] = {static_cast<uint32_t>(i), bytes_[at(i)], pair};
  }
  parts[count] = {static_cast<uint32_t>(count), kNone, kNone};  // where the last part ends
  const auto pair_rank = [&](size_t i) {
    if (i + 1 >= count) return kNone;
    return find(piece.substr(parts[i].start, parts[i + 2].start - parts[i].start));
  };
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (parts[i].pair < parts[best].pair) best = i;
    }
    if (parts[best].pair == kNone) break;
    parts[best].id = parts[best].pair;
    std::copy(parts.begin() + best + 2, parts.begin() + count + 1, parts.begin() + best + 1);
    --count;
    parts[best].pair = pair_rank(best);
    if (best > 0) parts[best - 1].pair = pair_rank(best - 1);
  }
  for (size_t i = 0; i < count; ++i) ids->push_back(parts[i].id);
}

void RankTable::merge_long(std::string_view piece, std::vector<int32_t>* ids) const {
  // Parts are named by where they start and linked both ways; `end[i]` is 0 once part i is merged
  // into its left neighbour.
  const auto size = static_cast<uint32_t>(piece.size());
  std::vector<uint32_t> end(size);
  std::vector<uint32_t> previous(size);
  std::vector<int32_t> id(size);
  struct Pair {
    int32_t rank;
    uint32_t start;
    uint32_t end;
    bool operator>(const Pair& other) const {
      return rank != other.rank ? rank > other.rank : start > other.start;
    }
  };
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> heap;
  const auto offer = [&](uint32_t start) {
    if (end[start] == size) return;
    const uint32_t pair_end = end[end[start]];
    const int32_t rank = find(piece.substr(start, pair_end - start));
    if (rank != kNone) heap.push({rank, start, pair_end});
  };
  for (uint32_t i = 0; i < size; ++i) {
    end[i] = i + 1;
    previous[i] = i - 1;  // never read for part 0
    id[i] = bytes_[static_cast<unsigned char>(piece[i])];
  }
  for (uint32_t i = 0; i < size; ++i) offer(i);
  while (!heap.empty()) {
    const Pair pair = heap.top();
    heap.pop();
    // An entry is stale once either of its parts has changed. The same bytes have the same rank, so
    // start and end say it all.
    const uint32_t left = pair.start;
    if (end[left] == 0 || end[left] == size) continue;
    const uint32_t right = end[left];
    if (end[right] != pair.end) continue;
    id[left] = pair.rank;
    end[left] = pair.end;
    end[right] = 0;
    if (pair.end < size) previous[pair.end] = left;
    offer(left);
    if (left > 0) offer(previous[left]);
  }
  for (uint32_t i = 0; i < size; i = end[i]) ids->push_back(id[i]);
}

}  // namespace k3
