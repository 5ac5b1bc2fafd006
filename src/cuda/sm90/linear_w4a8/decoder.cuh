// Warps that decode weights into shared memory, for all consumers: a weight is decoded once for each tile of tokens,
// and products whose operands both lie in shared memory are the faster ones.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/linear/producer.cuh"
#include "cuda/sm90/linear_w4a8/config.h"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
class Decoder {
 public:
  using Scales = typename C::Scales;

  static __device__ void init_barriers(DecodedMemory<C>& shared) {
    for (int i = 0; i < C::kDecodedStages; ++i) {
      ptx::barrier_init(shared.decoded_ready[i], C::kDecoders);
      ptx::barrier_init(shared.decoded_free[i], 4 * C::kConsumers);
    }
  }

  // number: of this warp among the decoders.
  __device__ Decoder(DecodedMemory<C>& memory, int number)
      : shared(memory), first_item(number), lane(threadIdx.x % 32) {}

  __device__ void run(const linear::Schedule& s) {
#pragma unroll 1
    for (int n = 0;; ++n) {
      const linear::Part part = linear::part_of<C>(s, n);
      if (part.begin == part.end) return;
#pragma unroll 1
      for (int unit = part.begin; unit < part.end; ++unit) decode_unit();
    }
  }

 private:
  // A warp decodes 16 rows and 64 columns at a time.
  static constexpr int kItemRows = 16, kItemColumns = 64, kHalves = C::kPanelColumns / kItemColumns;
  static constexpr int kItems = C::kTileBlocks * lowbit::kBlockRows / kItemRows * kHalves;
  struct Item {
    uint4 codes;
    std::uint32_t upper_scales, lower_scales;  // of two steps, of rows 8 apart
  };

  __device__ Item load(int number) const {
    const typename C::WeightBlock& block = shared.weights[stage.index][number / 8][0];
    const int rows = number / kHalves % 4, half = number % kHalves, row = rows * kItemRows + lane / 4;
    const std::byte* const scales = Scales::at(block, row, lane) + half * Scales::kHalfBytes;
    return {*reinterpret_cast<const uint4*>(block.codes[half][rows * 32 + lane]),
            *reinterpret_cast<const std::uint16_t*>(scales),
            *reinterpret_cast<const std::uint16_t*>(scales + 8 * Scales::kRowBytes)};
  }

  __device__ void store(int number, const Item& item) const {
    constexpr int kPiece = 16;  // columns, and bytes
    const int rows = number / kHalves % 4, half = number % kHalves;
    // Of the four matrices that are stored at a time lanes 0-7, 8-15... name the rows: the upper 8 of the 16 and the
    // lower 8, of one piece and of the next.
    const int row = rows * kItemRows + lane / 8 % 2 * 8 + lane % 8;
    const std::uint32_t to = ptx::shared_address(shared.decoded[place.index][number / 8][row]);
    const auto piece_at = [&](int piece) { return to + ((piece + lane / 16) ^ lane % 8) * kPiece; };
    std::uint32_t r[4];
    widen(item.codes.x, Scales::first(item.upper_scales), r[0], r[2]);
    widen(item.codes.y, Scales::first(item.lower_scales), r[1], r[3]);
    ptx::store_matrix_x4(piece_at(4 * half), r[0], r[1], r[2], r[3]);
    widen(item.codes.z, Scales::second(item.upper_scales), r[0], r[2]);
    widen(item.codes.w, Scales::second(item.lower_scales), r[1], r[3]);
    ptx::store_matrix_x4(piece_at(4 * half + 2), r[0], r[1], r[2], r[3]);
  }

  __device__ void decode_unit() {
    constexpr int kMost = (kItems + C::kDecoders - 1) / C::kDecoders;
    static_assert(lowbit::kBlockRows / kItemRows * kHalves == 8);
    await_filled(shared.ready[stage.index], stage.phase);
    Item item = load(first_item);
    ptx::barrier_wait(shared.decoded_free[place.index], place.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int number = first_item + i * C::kDecoders;
      if (number >= kItems) break;  // one answer in the warp
      Item next;
      if (i + 1 < kMost) next = load(min(number + C::kDecoders, kItems - 1));
      store(number, item);
      item = next;
    }
    finish_reads();  // and what was stored is there for products
    __syncwarp();
    if (ptx::elect_one()) ptx::barrier_arrive(shared.decoded_ready[place.index]);
    stage.next();
    place.next();
  }

  DecodedMemory<C>& shared;
  const int first_item, lane;
  RingPosition<C::kStages> stage;
  RingPosition<C::kDecodedStages> place;
};

}  // namespace heddle::cuda::sm90::linear_w4a8
