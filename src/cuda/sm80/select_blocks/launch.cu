// Which instantiation, and the launch.
#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/select_blocks/host.h"
#include "cuda/sm80/select_blocks/kernel.cuh"

namespace heddle::cuda::sm80::select_blocks {
namespace {

int head_of(const SelectProblem& p) { return p.D <= 64 ? 64 : p.D <= 128 ? 128 : 256; }

template <class T, int kHead>
auto kernel_of(const SelectProblem& p) {
  return p.slots <= kWarp ? select_kernel<T, kHead, 1> : select_kernel<T, kHead, kMostSlots / kWarp>;
}

template <class T>
auto kernel_of(const SelectProblem& p) {
  const int head = head_of(p);
  return head == 64 ? kernel_of<T, 64>(p) : head == 128 ? kernel_of<T, 128>(p) : kernel_of<T, 256>(p);
}

}  // namespace

std::int64_t positions_of_cta(const SelectProblem& p) { return kRows / p.G; }

std::size_t shared_bytes(const SelectProblem& p) {
  return layout(head_of(p), static_cast<int>(positions_of_cta(p)), static_cast<int>(p.slots),
                static_cast<int>(p.narrow()))
      .bytes;
}

void launch(const SelectProblem& p, void* stream) {
  Params params{};
  params.problem = p;
  params.positions = static_cast<int>(positions_of_cta(p));
  params.position_tiles = static_cast<int>((p.Sq + params.positions - 1) / params.positions);
  params.wide = static_cast<int>(p.wide());
  params.narrow = static_cast<int>(p.narrow());
  params.scale_log2 = p.scale * kLog2e;
  const std::int64_t blocks = p.B * p.Hkv * params.position_tiles;
  start("select_blocks", p.dtype == DType::f16 ? kernel_of<__half>(p) : kernel_of<__nv_bfloat16>(p),
        {static_cast<unsigned>(blocks), kThreads, shared_bytes(p)}, static_cast<cudaStream_t>(stream), params);
}

}  // namespace heddle::cuda::sm80::select_blocks
