// Starts one decoder's instantiations.
#pragma once

#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/linear/decode/bytes.cuh"
#include "cuda/sm80/linear/decode/e2m1.cuh"
#include "cuda/sm80/linear/decode/int4.cuh"
#include "cuda/sm80/linear/decode/lookup.cuh"
#include "cuda/sm80/linear/kernel.cuh"
#include "cuda/sm80/linear/variants.h"

namespace heddle::cuda::sm80::linear {

using cuda::linear::kSlices;

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  const std::size_t shared = sizeof(SharedMemory<C>) + params.stages * sizeof(Stage<C>) +
                             (C::Decoder::kTable ? table_bytes(params.lookup_copies) : 0);
  start("linear_forward", linear_kernel<C>,
        {.blocks = static_cast<unsigned>(grid), .threads = C::kThreads, .shared_bytes = shared, .overlaps = true},
        stream, params);
}

template <class C>
constexpr Variant variant_of() {
  return {.tile = {.tokens = C::kTokens,
                   .row_blocks = C::kTileBlocks,
                   .unit_blocks = C::kUnitBlocks,
                   .row_groups = C::kRowGroups,
                   .accumulators = C::kAccumulators,
                   .slices = kSlices<C>},
          .fixed_bytes = sizeof(SharedMemory<C>),
          .stage_bytes = sizeof(Stage<C>),
          .table = C::Decoder::kTable,
          .launch = launch<C>};
}

template <class T, Decoder kDecoder>
constexpr auto decoder_type() {
  if constexpr (kDecoder == Decoder::kE2M1) return std::type_identity<E2M1<T>>();
  if constexpr (kDecoder == Decoder::kInt4) return std::type_identity<Int4<T>>();
  if constexpr (kDecoder == Decoder::kLookup) return std::type_identity<Lookup<T>>();
  if constexpr (kDecoder == Decoder::kInt8) return std::type_identity<Int8<T>>();
  if constexpr (kDecoder == Decoder::kE4M3) return std::type_identity<E4M3<T>>();
}

template <DType kType, int kRow>
Variants Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  using D = typename decltype(decoder_type<ElementOf<kType>, row.decoder>())::type;
  constexpr Variant few = variant_of<Config<D, kFew>>();
  constexpr Variant many = variant_of<Config<D, kMany>>();
  constexpr int kLeast = 2, kCopies = 8;  // what a GPU with the least shared memory has room for
  static_assert(shared_bytes(few, kLeast, kCopies) <= kAmpereSharedBytes);
  static_assert(shared_bytes(many, kLeast, kCopies) <= kAmpereSharedBytes);
  return {row, kType, few, many};
}

}  // namespace heddle::cuda::sm80::linear
