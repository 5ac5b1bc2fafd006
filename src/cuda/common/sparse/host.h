// How a call over lists is cut, and the index of its pairs, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cuda/common/sparse/csr.h"
#include "cuda/common/sparse/params.h"
#include "problem/candidate.h"

namespace heddle::cuda::sparse {

constexpr int kMostSlots = 1024;  // of lists of one length

// Arrays one behind the other, each from a multiple of 256 bytes on. Without memory it counts.
class Arrays {
 public:
  explicit Arrays(void* memory) : memory_(static_cast<std::byte*>(memory)) {}

  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = bytes_;
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + at);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  std::size_t bytes_ = 0;
};

// The pairs of some lists at a time have partial results in memory.
struct Cut {
  std::int64_t units, group, rows;  // as in Index
  std::int64_t lists, lists_at_once;
  std::int64_t blocks;
  std::int64_t pairs, pairs_of_item, item_limit, lists_of_tile;  // pairs: of as many lists; by offsets, of a round
  std::int64_t longest;  // blocks that one list can name: its entries, or by offsets no more than a sequence has
  int subs, tile_keys;   // as in Index
  int head;              // 64 or 128: columns of a row in shared memory
};

// What a kernel keeps of a pair's row and a tile of keys, and how much it gives to a CTA.
struct Share {
  std::int64_t row_bytes;
  std::size_t bytes;  // of all partial results in memory at a time
  std::int64_t item_rows, item_pairs;
};

Cut cut_of(const SparseProblem& p, const Share& share);

// All of it but first and count. pairs: with what launch_index() writes.
Index index_of(const SparseProblem& p, const Cut& cut, Arrays& arrays, bool pairs = true);

// Writes what Index names, of lists [first, first + count); the same every time.
void launch_index(const Index& index, std::string_view operation, cudaStream_t stream);

// Of lists by offsets, beside their index. launch_csr() sums lengths, finds the first round and clears what
// for_rounds() (csr.cuh) counts in.
Csr csr_of(const Cut& cut, const Index& index, Arrays& arrays);
void launch_csr(const Index& index, const Csr& csr, std::string_view operation, cudaStream_t stream);

// Why these kernels do not take a call; empty if they do.
Refusal refuse(const SparseProblem& p, const Cut& cut);

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }
constexpr unsigned blocks_of(std::int64_t threads, std::int64_t of_block) {
  return static_cast<unsigned>(ceil_div(threads, of_block));
}

}  // namespace heddle::cuda::sparse
