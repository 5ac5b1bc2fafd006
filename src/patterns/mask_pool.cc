#include "patterns/mask_pool.h"

#include <algorithm>
#include <bit>

namespace heddle {

MaskPool::MaskPool(std::int64_t rows, std::int64_t keys) : rows_(rows), keys_(keys), words_((keys + 31) / 32) {}

MaskId MaskPool::intern(std::vector<std::uint32_t> words) {
  std::int64_t pairs = 0;
  for (const std::uint32_t word : words) pairs += std::popcount(word);
  if (pairs == 0) return kNoTile;
  if (pairs == rows_ * keys_) return kWholeTile;
  const auto bytes = [](const std::vector<std::uint32_t>& of) {
    return std::string_view(reinterpret_cast<const char*>(of.data()), of.size() * sizeof(std::uint32_t));
  };
  if (const auto found = known_.find(bytes(words)); found != known_.end()) return found->second;
  const auto id = static_cast<MaskId>(masks_.size());
  masks_.push_back(std::move(words));
  pairs_.push_back(pairs);
  known_.emplace(bytes(masks_.back()), id);
  return id;
}

template <class Join>
MaskId MaskPool::joined(std::unordered_map<std::uint64_t, MaskId>& known, MaskId a, MaskId b, const Join& join) {
  if (a > b) std::swap(a, b);
  const std::uint64_t key = std::uint64_t{static_cast<std::uint32_t>(a)} << 32 | static_cast<std::uint32_t>(b);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  std::vector<std::uint32_t> out = words(a);
  std::ranges::transform(out, words(b), out.begin(), join);
  return known[key] = intern(std::move(out));
}

MaskId MaskPool::either(MaskId a, MaskId b) {
  if (a == kNoTile || b == kWholeTile || a == b) return b;
  if (b == kNoTile || a == kWholeTile) return a;
  return joined(either_, a, b, [](std::uint32_t x, std::uint32_t y) { return x | y; });
}

MaskId MaskPool::both(MaskId a, MaskId b) {
  if (a == kNoTile || b == kWholeTile || a == b) return a;
  if (b == kNoTile || a == kWholeTile) return b;
  return joined(both_, a, b, [](std::uint32_t x, std::uint32_t y) { return x & y; });
}

std::int64_t MaskPool::pairs(MaskId id) const {
  return id == kNoTile ? 0 : id == kWholeTile ? rows_ * keys_ : pairs_[static_cast<std::size_t>(id)];
}

}  // namespace heddle
