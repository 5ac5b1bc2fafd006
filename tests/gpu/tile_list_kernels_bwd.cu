#include "cuda/sm80/attention_bwd/launch.cuh"
#include "cuda/sm80/attention_bwd/launch.h"
#include "gpu/tile_list_kernels_bwd.h"

namespace heddle::kit {
namespace {

namespace sm80 = cuda::sm80::attention_bwd;

// The library's own tilings.
constexpr int kRow = cuda::row_named(sm80::k16BitVariants, "d64");
constexpr sm80::Tilings kTilings = sm80::k16BitVariants[kRow].tilings;

// Not by launch() of launch.cuh: in a shared library that asks a CUDA runtime of its own, which does not know this
// kernel.
template <class C>
void start(const sm80::Params& params, cudaStream_t stream) {
  const auto kernel = sm80::attention_bwd_kernel<C>;
  constexpr int kBytes = sizeof(sm80::SharedMemory<C>);
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "tile lists");
  kernel<<<static_cast<unsigned>(params.k_tiles) * params.units, C::kThreads, kBytes, stream>>>(params);
  cuda::check(cudaGetLastError(), "tile lists");
}

template <sm80::Tiling kTiling, bool kOptions, sm80::Variant sm80::Variants::*kSame>
struct Listed {
  using C = sm80::Config<__nv_bfloat16, 1, 64, kTiling, kOptions, ListWalk<int>>;

  // The library's, but for its main kernel.
  static sm80::Variant variant() {
    sm80::Variant v = sm80::variants(DType::bf16)[kRow].*kSame;
    v.launch = start<C>;
    return v;
  }
  static std::size_t workspace(const AttentionBackwardProblem& p) { return sm80::workspace_of(p, variant()); }
  static void launch(const AttentionBackwardProblem& p, const std::int32_t* tiles, const std::int32_t* counts,
                     std::int64_t length, const Runtime& runtime) {
    sm80::launch_call(p, variant(), {.tiles = tiles, .counts = counts, .length = length}, runtime);
  }
  static constexpr ListedBackward kernel() { return {"sm80", C::kTileQ, C::kTileK, workspace, launch}; }
};

}  // namespace

const ListedBackward kListedBackwardSm80Plain = Listed<kTilings.plain, false, &sm80::Variants::plain>::kernel();
const ListedBackward kListedBackwardSm80Options = Listed<kTilings.options, true, &sm80::Variants::options>::kernel();

}  // namespace heddle::kit
