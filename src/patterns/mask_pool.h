// Masks of tiles, each kept once and named by a number, so that joining two is looked up where it was done before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace heddle {

// A number from 0 on, or one of these.
using MaskId = std::int32_t;
constexpr MaskId kWholeTile = -1, kNoTile = -2;

// Of tiles of `rows` rows and `keys` keys, as BlockLists::masks has them.
class MaskPool {
 public:
  MaskPool(std::int64_t rows, std::int64_t keys);

  // The mask of the pairs (row, key) that keeps(row, key) says.
  template <class Keeps>
  MaskId make(const Keeps& keeps) {
    std::vector<std::uint32_t> words(static_cast<std::size_t>(rows_ * words_), 0);
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t j = 0; j < keys_; ++j) {
        if (keeps(r, j)) words[static_cast<std::size_t>(r * words_ + j / 32)] |= 1u << (j % 32);
      }
    }
    return intern(std::move(words));
  }
  MaskId either(MaskId a, MaskId b);
  MaskId both(MaskId a, MaskId b);
  // Pairs that it keeps.
  std::int64_t pairs(MaskId id) const;
  const std::vector<std::uint32_t>& words(MaskId id) const { return masks_[static_cast<std::size_t>(id)]; }
  std::size_t size() const { return masks_.size(); }

 private:
  MaskId intern(std::vector<std::uint32_t> words);
  template <class Join>
  MaskId joined(std::unordered_map<std::uint64_t, MaskId>& known, MaskId a, MaskId b, const Join& join);

  std::int64_t rows_, keys_, words_;
  std::deque<std::vector<std::uint32_t>> masks_;  // never moved: the map's keys are their bytes
  std::vector<std::int64_t> pairs_;
  std::unordered_map<std::string_view, MaskId> known_;
  std::unordered_map<std::uint64_t, MaskId> either_, both_;
};

}  // namespace heddle
