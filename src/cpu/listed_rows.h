// The inverse of lists of key blocks: which rows of a chunk list a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "cpu/plan.h"
#include "cpu/scratch.h"
#include "problem/sparse.h"

namespace heddle::cpu {

// The rows of a chunk that list each block. Rows are numbered (i - first position) * G + g.
class ListedRows {
 public:
  ListedRows(const AttentionProblem& p, const KeyLists& lists, std::int64_t positions, Scratch& scratch)
      : p_(p), lists_(lists), blocks_(ceil_div(p.Sk, lists.block_size)) {
    first_ = scratch.take<std::int64_t>(blocks_ + 2);
    seen_ = scratch.take<std::int64_t>(blocks_);
    const std::int64_t most = positions * p.G * std::min(lists.entries, blocks_);
    rows_ = scratch.take<std::int32_t>(most);
    if (lists.masked) ids_ = scratch.take<std::int32_t>(most);
  }

  void find(const Sequence& s, const SparseTask& task) {
    const Band band = p_.band(s);
    // Rows of block c are counted at first_[c + 2]. Summed up, first_[c + 1] is where its next row goes, and at last
    // where they end.
    std::fill_n(first_, blocks_ + 2, std::int64_t{0});
    std::fill_n(seen_, blocks_, -1);
    for_each(s, task, band,
             [&](std::int64_t c, std::int32_t, std::int64_t heads, std::int32_t) { first_[c + 2] += heads; });
    for (std::int64_t c = 1; c <= blocks_; ++c) first_[c + 1] += first_[c];
    std::fill_n(seen_, blocks_, -1);
    for_each(s, task, band, [&](std::int64_t c, std::int32_t row, std::int64_t heads, std::int32_t id) {
      for (std::int64_t g = 0; g < heads; ++g) {
        if (ids_ != nullptr) ids_[first_[c + 1]] = id;
        rows_[first_[c + 1]++] = row + static_cast<std::int32_t>(g);
      }
    });
  }

  std::int64_t blocks() const { return blocks_; }
  // Ascending.
  std::span<const std::int32_t> of(std::int64_t c) const { return {rows_ + first_[c], rows_ + first_[c + 1]}; }

  // 32-bit words that load_masks() writes for `rows` rows; 0 if there are no masks.
  std::int64_t mask_words(std::int64_t rows, std::int64_t group) const {
    return !lists_.masked ? 0 : round_up(rows, group) * lists_.mask_words();
  }
  // The masks of rows [n, n + count) of block c, numbered from `first_row` of the kv head on: [group of rows][word][row
  // of the group], 0 for rows behind the last. False if each of them meets the whole block; nothing is written then.
  bool load_masks(std::int64_t c, std::int64_t n, std::int64_t count, std::int64_t first_row, std::int64_t group,
                  std::uint32_t* out) const {
    if (!lists_.masked) return false;
    const std::int32_t *rows = rows_ + first_[c] + n, *ids = ids_ + first_[c] + n;
    if (std::all_of(ids, ids + count, [](std::int32_t id) { return id == -1; })) return false;
    const std::int64_t words = lists_.mask_words();
    std::fill_n(out, mask_words(count, group), 0u);
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int32_t* from = lists_.mask_row(ids[k], (first_row + rows[k]) / p_.G);
      std::uint32_t* to = out + k / group * group * words + k % group;
      for (std::int64_t w = 0; w < words; ++w) {
        to[w * group] = ids[k] == -1 ? ~0u : from == nullptr ? 0u : static_cast<std::uint32_t>(from[w]);
      }
    }
    return true;
  }

 private:
  // visit(block, first row, rows, mask) for each list's blocks, each once, that hold a key which the list's row may
  // meet. Of entries that name the same block that is the first.
  template <class Visit>
  void for_each(const Sequence& s, const SparseTask& task, const Band& band, const Visit& visit) {
    const bool by_head = lists_.units == p_.H && p_.G > 1;
    const std::int64_t lists = by_head ? p_.G : 1, heads = by_head ? 1 : p_.G;
    const std::int64_t unit = by_head ? task.kv_head * p_.G : lists_.units == 1 ? 0 : task.kv_head;
    for (std::int64_t i = task.row_begin; i < std::min(task.row_end, s.sq); ++i) {
      const KeyRange met = tiles_of(band.keys_of(i), lists_.block_size);
      for (std::int64_t l = 0; l < lists; ++l) {
        const std::int64_t row = (i - task.row_begin) * p_.G + l;
        const std::span<const std::int32_t> list = lists_.list(p_, task.b, s, i, unit + l);
        const std::int32_t* ids = ids_ == nullptr ? nullptr : lists_.ids(p_, task.b, s, i, unit + l);
        for (std::size_t n = 0; n < list.size(); ++n) {
          const std::int32_t block = list[n];
          if (block < met.begin || block >= met.end || seen_[block] == row) continue;
          seen_[block] = row;
          visit(block, static_cast<std::int32_t>(row), heads, ids == nullptr ? -1 : ids[n]);
        }
      }
    }
  }

  const AttentionProblem& p_;
  const KeyLists& lists_;
  const std::int64_t blocks_;
  std::int64_t *first_ = nullptr, *seen_ = nullptr;  // seen_: the last list that named a block
  std::int32_t *rows_ = nullptr, *ids_ = nullptr;    // ids_: their masks
};

}  // namespace heddle::cpu
