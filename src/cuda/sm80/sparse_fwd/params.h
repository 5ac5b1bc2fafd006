// What the kernels of attention over lists are told, and where their memory lies. A (list, head unit, slot) is a pair:
// the rows of a list meet the block that the slot names. A head unit is what has a list of its own: a kv head with its
// group of query heads, or one query head.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "problem/sparse.h"

namespace heddle::cuda::sm80::sparse_fwd {

constexpr int kWarp = 32;
constexpr int kItemRows = 256;  // of an item: rows of q that one CTA multiplies with one block

// A pair that names a block, and its list's first row in the sequence.
struct Named {
  int pair, row;
};

// One CTA's work: `count` pairs, from named[first] on, that name a block of a sequence.
struct Item {
  int b, unit, block;
  int first, count;
};

struct Statistics {
  float lse, scale;  // natural; what the row of halves is multiplied with
};

struct Params {
  SparseProblem problem;
  int units, group;  // head units; query heads of each
  int rows;          // of a pair: group * lists.query_rows
  int slots;         // of a list
  int pairs_of_item;
  std::int64_t first;   // list of this launch
  std::int64_t count;   // of lists
  std::int64_t blocks;  // numbers of blocks of a head unit, over all sequences
  float scale_log2;
  bool o_pairs;  // two neighbouring elements of o may be written at once

  int* counts;             // [units, blocks]: pairs that name a block
  int* begins;             // [units, blocks]: where they begin in `order`
  int* item_begins;        // [units, blocks]
  int* items_there;        // [1]
  int* block_of;           // [pairs]
  int* place_of;           // [pairs]: among those of its block; -1 for one that says nothing
  Named* named;            // [pairs], by block
  Item* items;             // [item_limit]
  Statistics* statistics;  // [pairs, rows]; of a row without keys lse is -inf
  __half* partial;         // [pairs, rows, head size], normalised, in the order of mma's fragments

  // Of a list: its sequence, and its first row there.
  struct Place {
    std::int64_t b = 0, row = 0;
    Sequence s;
    bool there = false;  // it has rows that are stored
  };
  constexpr Place place(std::int64_t list) const {
    const SparseProblem& p = problem;
    const std::int64_t share = p.lists.query_rows;
    Place at;
    if (!p.cu_seqlens_q.given) {
      const std::int64_t of_sequence = (p.Sq + share - 1) / share;
      at.b = list / of_sequence;
      at.row = (list - at.b * of_sequence) * share;
    } else {
      const auto first_list = [&](std::int64_t b) {
        const std::int64_t begin = clamped(p.cu_seqlens_q[b], 0, p.q_rows);
        return share == 1 ? begin : begin / share + b;
      };
      std::int64_t low = 0, high = p.B;  // low begins there or before, high does not
      while (high - low > 1) {
        const std::int64_t middle = low + (high - low) / 2;
        (first_list(middle) <= list ? low : high) = middle;
      }
      at.b = low;
      at.row = (list - first_list(low)) * share;
    }
    at.s = p.sequence(at.b);
    at.there = at.row >= 0 && at.row < at.s.q_rows;
    return at;
  }

  // Keys of lists have steps of 1: a constant, so that nothing is divided.
  constexpr Band band(const Sequence& s) const {
    Band band = problem.band(s);
    band.key_step = 1;
    return band;
  }

  // The number, within a head unit, of block 0 of a sequence.
  constexpr std::int64_t first_block(std::int64_t b, const Sequence& s) const {
    const std::int64_t size = problem.lists.block_size;
    return problem.cu_seqlens_k.given ? s.k_begin / size + b : b * ((problem.Sk + size - 1) / size);
  }
};

}  // namespace heddle::cuda::sm80::sparse_fwd
