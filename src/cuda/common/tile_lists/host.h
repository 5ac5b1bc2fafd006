// Lists of tiles for kernels that walk over them (problem/tile_lists.h), of a call's lists of key blocks, made on the
// device in time and memory of the lists' size. The same every time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "cuda/common/sparse/host.h"
#include "problem/candidate.h"
#include "problem/sparse.h"
#include "problem/tile_lists.h"

namespace heddle::cuda::tile_lists {

// Keys of a tile of a backward, whose entries say which halves of it they are about: two blocks, or one.
constexpr int kKeysOfTile = 128, kPartBits = 2;

// How a kernel cuts rows: of lists that its tiles must not span.
struct RowTiles {
  std::int64_t rows;   // positions of one; query_rows is a multiple
  std::int64_t heads;  // that have tiles of their own: a multiple of the lists' head units
};

// For each tile of rows the tiles of `keys` keys of which its list names a block that some row of the list meets:
// ascending, none twice. arrays: memory for them; without, they are counted, and nothing is started.
TileLists keys_of_rows(const SparseProblem& p, const RowTiles& tiles, std::int64_t keys, sparse::Arrays& arrays,
                       std::string_view operation, cudaStream_t stream);

// For each tile of kKeysOfTile keys the tiles of rows whose lists name a block of it, by head: index * 2^kPartBits and
// a bit for each half. in_turns: with places, the last tile of keys first.
TileLists rows_of_keys(const SparseProblem& p, const RowTiles& tiles, bool in_turns, sparse::Arrays& arrays,
                       std::string_view operation, cudaStream_t stream);

// Whether rows_of_keys() can number its entries.
bool fits(const SparseProblem& p, const RowTiles& tiles);

// Why exact kernels of 16 bits for Hopper do not take a call over lists, whatever their tiles; empty if they do.
Refusal refuse(const SparseProblem& p);

}  // namespace heddle::cuda::tile_lists
