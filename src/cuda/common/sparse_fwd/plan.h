// How a call over lists is done, and its memory.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/common/sparse/host.h"
#include "cuda/common/sparse_fwd/params.h"

namespace heddle::cuda::sparse_fwd {

// Where a CTA has one tile of rows by rows: as many, and the warps that then have the same ones.
constexpr int kRowTile = 64, kSharingWarps = 4;

// by_keys: a block's keys meet all rows that name it. by_rows: a list's rows go through its blocks. together: the rows
// of neighbouring lists go through the blocks that any of them names.
enum class Way { by_keys, by_rows, together };

struct Plan : sparse::Cut {
  Way way;
  int parts, row_tiles, share;  // share: warps that have the same rows
  bool in_rounds;               // by keys, of lists by offsets: the device cuts them
  std::int64_t tiles_together;  // of lists, of a head unit
  std::size_t bytes;
};

// hopper: with the ways that only Hopper's candidate has.
Plan plan_of(const SparseProblem& problem, bool hopper);
Params params_of(const SparseProblem& problem, const Plan& plan, sparse::Arrays& arrays);

// Why these kernels do not take a call; empty if they do.
Refusal refuse(const SparseProblem& problem, const Plan& plan);

// In words, for explain.
std::string description(const SparseProblem& problem, const Plan& plan);

// Bytes that move: by keys each pair reads its rows of q, and writes and reads a partial result; by rows each tile of
// rows reads the list's keys and values, which the L2 cache has. Together as by keys, though what moves is the blocks
// that neighbours name: how many those are follows from the lists and from the other sequences' lengths, and what is
// chosen must not.
double moved_bytes(const SparseProblem& problem, const Plan& plan);

}  // namespace heddle::cuda::sparse_fwd
