#include "cuda/sm90/attention_bwd/launch.cuh"
#include "cuda/sm90/attention_bwd/launch.h"
#include "gpu/tile_list_kernels_bwd.h"

namespace heddle::kit {
namespace {

namespace sm90 = cuda::sm90::attention_bwd;

// Not by launch() of launch.cuh: see tile_list_kernels_bwd.cu.
template <class C>
void start(const sm90::Params& params, int grid, cudaStream_t stream) {
  const auto kernel = sm90::attention_bwd_kernel<C>;
  constexpr int kBytes = sizeof(sm90::SharedMemory<C>);
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "tile lists");
  kernel<<<grid, sm90::kThreads, kBytes, stream>>>(params);
  cuda::check(cudaGetLastError(), "tile lists");
}

template <int kRow>
struct Listed {
  using C = sm90::Config<__nv_bfloat16, sm90::kVariants[kRow].tiles, sm90::kVariants[kRow].option, ListWalk<int>>;

  // The library's, but for its main kernel.
  static sm90::Variant variant() {
    sm90::Variant v = sm90::variants(DType::bf16)[kRow];
    v.launch = start<C>;
    return v;
  }
  static int parts(const AttentionBackwardProblem& p) { return sm90::parts_of_group(p, variant()); }
  static std::size_t workspace(const AttentionBackwardProblem& p) { return sm90::workspace_of(p, variant(), parts(p)); }
  static void launch(const AttentionBackwardProblem& p, const std::int32_t* tiles, const std::int32_t* counts,
                     std::int64_t length, const Runtime& runtime) {
    const std::int64_t k_tiles = (p.Sk + C::kTileK - 1) / C::kTileK;
    TileLists lists = a_list_a_tile(tiles, counts, length, p.Hkv, k_tiles);
    lists.heads_of_list = parts(p);
    sm90::launch_call(p, variant(), parts(p), lists, runtime);
  }
  static constexpr ListedBackward kernel() { return {"sm90", C::kTileQ, C::kTileK, workspace, launch}; }
};

}  // namespace

const ListedBackward kListedBackwardSm90Plain = Listed<cuda::row_named(sm90::kVariants, "d64")>::kernel();
const ListedBackward kListedBackwardSm90Planes = Listed<cuda::row_named(sm90::kVariants, "d64 planes")>::kernel();

}  // namespace heddle::kit
