// Lists of key blocks for a case of the table, drawn at random, and the mask that says the same.
#pragma once

#include <cstdint>

#include "heddle/sparse.h"
#include "kit/case_data.h"

namespace heddle::kit {

struct ListShape {
  std::int64_t block_size = 16, query_rows = 1;
  std::int64_t units = 1;    // L
  std::int64_t entries = 3;  // n
  bool counts = false;
  std::int64_t masks = 0;  // M; 0: none
};

// Entries are in no order, some of them twice, -1, or blocks that are not there; some counts are 0, negative or above
// n. Of masks some have no bit or all, and some numbers are no mask's.
struct CaseLists {
  HostTensor blocks, counts, masks, mask_ids;
  BlockLists views;

  CaseLists(const CaseData& data, const ListShape& shape, std::uint64_t seed = 1);

  // Whether the list of row i of head h holds the block of key j under a mask that lets the pair: from the formula of
  // include/heddle/sparse.h alone.
  bool holds(const CaseData& data, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
  // Writes that into data.mask, [B, H, Sq, Sk], of a piece [B, H, Sq, columns].
  void write_mask(CaseData& data) const;
};

// The same lists one behind the other.
struct CsrLists {
  HostTensor blocks, offsets, mask_ids;
  BlockLists views;

  explicit CsrLists(const CaseLists& lists);
};

}  // namespace heddle::kit
