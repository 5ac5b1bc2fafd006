#include <algorithm>

#include "cuda/sm90/attention_fwd/launch.cuh"
#include "cuda/sm90/attention_fwd/launch.h"
#include "cuda/sm90/attention_fwd_fp8/launch.cuh"
#include "cuda/sm90/attention_fwd_fp8/launch.h"
#include "gpu/tile_list_kernels.h"

namespace heddle::kit {
namespace {

namespace sm90 = cuda::sm90;
namespace fwd = cuda::sm90::attention_fwd;
namespace fp8 = cuda::sm90::attention_fwd_fp8;

constexpr int kCtas = 3;

// Not by the library's launch<C>: in a shared library that asks a CUDA runtime of its own, which does not know this
// kernel.
template <class C, class SharedMemory, class Params>
void start(void (*kernel)(Params), const Params& params, void* stream) {
  constexpr int kBytes = sizeof(SharedMemory);
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "tile lists");
  kernel<<<std::min(params.tiles, kCtas), C::kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(params);
  cuda::check(cudaGetLastError(), "tile lists");
}

template <int kRow>
void launch_16bit(const AttentionProblem& p, const std::int32_t* tiles, const std::int32_t* counts, std::int64_t length,
                  void* stream) {
  constexpr fwd::Row row = fwd::kVariants[kRow];
  using C = fwd::Config<__nv_bfloat16, row.tiles, row.options, ListWalk<int>>;
  fwd::Params params = fwd::params_for(p, row, sm90::attention::make_plan(p, C::kConsumers));
  params.lists = a_list_a_tile(tiles, counts, length, params.heads, params.q_tiles);
  start<C, fwd::SharedMemory<C>>(fwd::attention_fwd_kernel<C>, params, stream);
}

template <int kRow>
void launch_e4m3(const AttentionProblem& p, const std::int32_t* tiles, const std::int32_t* counts, std::int64_t length,
                 void* stream) {
  using C = fp8::Config<__nv_bfloat16, fp8::kVariants[kRow].tiles, ListWalk<int>>;
  fp8::Params params = fp8::params_for(p, sm90::attention::make_plan(p, C::kConsumers), C::kTileK);
  params.lists = a_list_a_tile(tiles, counts, length, params.heads, params.q_tiles);
  start<C, fp8::SharedMemory<C>>(fp8::attention_fwd_fp8_kernel<C>, params, stream);
}

template <int kRow>
constexpr ListedForward listed_16bit() {
  constexpr fwd::Row row = fwd::kVariants[kRow];
  return {"sm90", row.name, fwd::kRows * row.tiles.consumers, row.tiles.keys, launch_16bit<kRow>};
}

template <int kRow>
constexpr ListedForward listed_e4m3() {
  using C = fp8::Config<__nv_bfloat16, fp8::kVariants[kRow].tiles>;
  return {"sm90_fp8", fp8::kVariants[kRow].name, sm90::attention::kRows * C::kConsumers, C::kTileK, launch_e4m3<kRow>};
}

// The walk is kept in registers, or in shared memory; keys, planes and terms of keys come by it.
constexpr ListedForward kListed[] = {
    listed_16bit<cuda::row_named(fwd::kVariants, "d64")>(),
    listed_16bit<cuda::row_named(fwd::kVariants, "d128")>(),
    listed_16bit<cuda::row_named(fwd::kVariants, "d256")>(),
    listed_16bit<cuda::row_named(fwd::kVariants, "d64 keys")>(),
    listed_16bit<cuda::row_named(fwd::kVariants, "d128 planes")>(),
    listed_16bit<cuda::row_named(fwd::kVariants, "d256 planes")>(),
    listed_e4m3<cuda::row_named(fp8::kVariants, "d64")>(),
    listed_e4m3<cuda::row_named(fp8::kVariants, "d128")>(),
    listed_e4m3<cuda::row_named(fp8::kVariants, "d128 tokens")>(),
};

}  // namespace

std::span<const ListedForward> listed_on_hopper() { return kListed; }

}  // namespace heddle::kit
