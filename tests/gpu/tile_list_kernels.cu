#include "gpu/tile_list_kernels.h"

#include "cuda/sm80/attention_fwd/launch.cuh"
#include "cuda/sm80/attention_fwd/launch.h"

namespace heddle::kit {
namespace {

namespace sm80 = cuda::sm80::attention_fwd;

template <class C>
void launch(const AttentionProblem& p, const std::int32_t* tiles, const std::int32_t* counts, std::int64_t length,
            void* stream) {
  constexpr sm80::Variant kVariant = sm80::variant_of<C>();
  sm80::Params params = sm80::params_for(p, kVariant);
  params.lists = {.tiles = tiles, .counts = counts, .length = length};
  // Not by kVariant.launch: in a shared library that asks a CUDA runtime of its own, which does not know this kernel.
  const auto kernel = sm80::attention_fwd_kernel<C>;
  constexpr int kBytes = sizeof(sm80::SharedMemory<C>);
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "tile lists");
  const auto blocks = static_cast<unsigned>(params.q_tiles) * params.units;
  kernel<<<blocks, C::kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(params);
  cuda::check(cudaGetLastError(), "tile lists");
}

template <sm80::Tiling kTiling, bool kOptions>
constexpr ListedForward listed(const char* name) {
  using C = sm80::Config<__nv_bfloat16, 1, 64, kTiling, kOptions, sm80::AlignedRows, __nv_bfloat16, ListWalk<int>>;
  return {"sm80", name, C::kTileQ, C::kTileK, launch<C>};
}

}  // namespace

// The library's own tilings.
constexpr sm80::Tilings kTilings = sm80::k16BitVariants[cuda::row_named(sm80::k16BitVariants, "d64")].tilings;
const ListedForward kListedSm80Plain = listed<kTilings.plain, false>("plain");
const ListedForward kListedSm80Options = listed<kTilings.options, true>("options");

}  // namespace heddle::kit
