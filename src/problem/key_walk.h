// Which tiles of keys a run of rows goes through, one step after the other. Loops over keys ask a walk and nothing
// else, so that they are the same for a band and for a list of tiles. Host and device.
#pragma once

#include <concepts>
#include <cstdint>

#include "problem/band.h"

namespace heddle {

// Steps are 0 <= n < count(), in ascending order of keys; a kernel may take them backwards. tile(n) begins at a
// multiple of the tile's size and ends a tile later, or behind the last key that the rows meet. whole(n): each row
// meets each key of it, so that nothing is to be masked.
template <class W>
concept KeyWalk = requires(const W walk, typename W::Index n) {
  { walk.count() } -> std::same_as<typename W::Index>;
  { walk.tile(n) } -> std::same_as<Interval<typename W::Index>>;
  { walk.whole(n) } -> std::same_as<bool>;
};

// One for kernels whose tiles have one size: they count through steps(), whatever numbers these are, and think in
// indices of tiles in the sequence. No row meets a key outside of keys().
template <class W>
concept TileWalk = KeyWalk<W> && requires(const W walk, typename W::Index n) {
  { walk.steps() } -> std::same_as<Interval<typename W::Index>>;
  { walk.index(n) } -> std::same_as<typename W::Index>;  // of the tile that step n takes
  { walk.whole_tile(n) } -> std::same_as<bool>;          // whole(), of the tile of that index
  // The steps to such tiles. By reference: where a walk lies in memory, a kernel reads what it compares and no more.
  { walk.whole_steps() } -> std::same_as<const Interval<typename W::Index>&>;
  { walk.keys() } -> std::same_as<Interval<typename W::Index>>;
} && requires(W walk) {
  walk.mask_all();       // for kernels that mask every tile, for a reason of their own: none is whole
  walk.take_one_step();  // for kernels that always take one: where there is none, to a tile of which no row meets a key
};

// All tiles of `size` keys that hold one that rows `rows` of the band meet, among `keys`, which begin at a tile.
template <class Int>
class BandWalk {
 public:
  using Index = Int;

  constexpr BandWalk() = default;
  constexpr BandWalk(const BasicBand<Int>& band, Interval<Int> rows, Interval<Int> keys, Int size)
      : met_(band.keys_of(rows).common(keys)), tiles_(tiles_of(met_, size)), size_(size) {
    set_whole(band.keys_of_each(rows));
  }
  // met: from the first to the last key that one of the rows meets; by_each: those that each of them meets.
  constexpr BandWalk(Interval<Int> met, Interval<Int> by_each, Int size)
      : met_(met), tiles_(tiles_of(met, size)), size_(size) {
    set_whole(by_each);
  }

  // For kernels that multiply all of a tile: one that is not full is to be masked.
  constexpr void mask_partial() {
    const Int full = met_.end / size_;
    if (whole_.end > full) whole_.end = full;
  }
  constexpr void mask_all() { whole_ = {}; }
  constexpr void take_one_step() {
    if (tiles_.empty()) tiles_ = {0, 1};
  }

  constexpr Int count() const { return tiles_.size(); }
  constexpr Interval<Int> tile(Int n) const { return keys_of_tile(tiles_.begin + n); }
  constexpr bool whole(Int n) const { return whole_tile(tiles_.begin + n); }

  constexpr Interval<Int> steps() const { return tiles_; }
  constexpr Int index(Int step) const { return step; }
  // Without a branch: of two, GPU kernels keep what both ways need in registers that they do not have.
  constexpr bool whole_tile(Int t) const { return (whole_.begin <= t) & (t < whole_.end); }
  constexpr const Interval<Int>& whole_steps() const { return whole_; }
  // From the first to the last key that one of the rows meets, and the tiles that hold them.
  constexpr Interval<Int> keys() const { return met_; }
  constexpr Interval<Int> tiles() const { return tiles_; }
  constexpr Interval<Int> keys_of_tile(Int t) const {
    const Int begin = t * size_, end = begin + size_;
    return {begin, end < met_.end ? end : met_.end};
  }

 private:
  constexpr void set_whole(Interval<Int> by_each) {
    whole_ = {(by_each.begin + size_ - 1) / size_, by_each.end >= met_.end ? tiles_.end : by_each.end / size_};
  }

  Interval<Int> met_, tiles_, whole_;
  Int size_ = 0;
};

// Those of a BandWalk's tiles that a list names: `count` ascending indices of tiles in the sequence, none twice. With
// kPartBits an entry is the index times 2^kPartBits and, in the bits below, which parts of the tile the list is about,
// a bit each.
template <class Int, int kPartBits = 0>
class ListWalk {
 public:
  using Index = Int;

  constexpr ListWalk() = default;
  constexpr ListWalk(const std::int32_t* list, Int count, const BandWalk<Int>& band) : band_(band) {
    const Int first = below(list, count, band.tiles().begin);
    list_ = list + first;
    count_ = below(list_, count - first, band.tiles().end);
    whole_ = {below(list_, count_, band.whole_steps().begin), below(list_, count_, band.whole_steps().end)};
  }

  constexpr void mask_all() {
    band_.mask_all();
    whole_ = {};
  }
  constexpr void take_one_step() {
    if (count_ > 0) return;
    list_ = nullptr;
    count_ = 1;
  }

  constexpr Int count() const { return count_; }
  constexpr Interval<Int> tile(Int n) const { return band_.keys_of_tile(index(n)); }
  constexpr bool whole(Int n) const { return whole_tile(index(n)); }

  constexpr Interval<Int> steps() const { return {0, count_}; }
  constexpr Int index(Int step) const { return list_ != nullptr ? list_[step] >> kPartBits : band_.tiles().end; }
  constexpr bool whole_tile(Int t) const { return band_.whole_tile(t); }
  constexpr const Interval<Int>& whole_steps() const { return whole_; }
  constexpr Interval<Int> keys() const { return band_.keys(); }

  // Which parts, of a step to a tile of the list.
  constexpr Int parts(Int step) const requires(kPartBits > 0) { return list_[step] & ((1 << kPartBits) - 1); }

  // Where the list has a step, of those to its tiles.
  constexpr const std::int32_t* entry(Int step) const { return list_ + step; }

  // How many of a list's first tiles have a smaller index than `index`.
  static constexpr Int below(const std::int32_t* list, Int count, Int index) {
    Int least = 0;
    while (least < count) {
      const Int middle = least + (count - least) / 2;
      if (list[middle] >> kPartBits < index) {
        least = middle + 1;
      } else {
        count = middle;
      }
    }
    return least;
  }

 private:
  BandWalk<Int> band_;
  const std::int32_t* list_ = nullptr;  // null: of the one step of take_one_step(), behind all tiles of the band
  Int count_ = 0;
  Interval<Int> whole_;  // steps to whole tiles
};

}  // namespace heddle
