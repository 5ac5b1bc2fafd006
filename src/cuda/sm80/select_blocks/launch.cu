// Which instantiation, and the launch.
#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/select_blocks/host.h"
#include "cuda/sm80/select_blocks/kernel.cuh"

namespace heddle::cuda::sm80::select_blocks {
namespace {

int head_of(const SelectProblem& p) { return p.D <= 64 ? 64 : p.D <= 128 ? 128 : 256; }

Params params_of(const SelectProblem& p, bool copies) {
  Params params{};
  params.problem = p;
  params.copies = copies ? kWarps : 1;
  params.pitch = copies ? kRows / kWarps : static_cast<int>(p.G);
  params.positions = copies ? 1 : static_cast<int>(kRows / p.G);
  params.position_tiles = static_cast<int>((p.Sq + params.positions - 1) / params.positions);
  params.wide = static_cast<int>(p.wide());
  params.narrow = static_cast<int>(p.narrow());
  if (p.page_table) params.by_page = Divisor(static_cast<unsigned>(p.page_size));
  params.scale_log2 = p.scale * kLog2e;
  return params;
}

// So few positions that CTAs of several would leave multiprocessors without work, and with what copies can do: a tile's
// sums need none of the tile before, and no lse is to be found. Lists are the same either way.
Params params_of(const SelectProblem& p) {
  const bool can = p.lse && p.narrow() == 1 && p.G <= kRows / kWarps && p.D <= 128 && p.slots <= kWarp;
  if (can && p.B * p.Hkv * p.Sq <= 2 * current_device().multiprocessors) {
    const Params params = params_of(p, true);
    if (static_cast<std::int64_t>(layout(params, head_of(p)).bytes) <= current_device().shared_memory) return params;
  }
  return params_of(p, false);
}

using Kernel = void (*)(Params);

template <class T, int kHead>
Kernel kernel_of(const Params& p) {
  if constexpr (kHead <= 128) {
    if (p.copies > 1) return select_kernel<T, kHead, 1, kWarps>;
  }
  return p.problem.slots <= kWarp ? select_kernel<T, kHead, 1, 1> : select_kernel<T, kHead, kMostSlots / kWarp, 1>;
}

template <class T>
Kernel kernel_of(const Params& p) {
  const int head = head_of(p.problem);
  return head == 64 ? kernel_of<T, 64>(p) : head == 128 ? kernel_of<T, 128>(p) : kernel_of<T, 256>(p);
}

}  // namespace

Cut cut_of(const SelectProblem& p) {
  const Params params = params_of(p);
  return {params.positions, params.copies, layout(params, head_of(p)).bytes};
}

void launch(const SelectProblem& p, void* stream) {
  const Params params = params_of(p);
  const std::int64_t blocks = p.B * p.Hkv * params.position_tiles;
  start("select_blocks", p.dtype == DType::f16 ? kernel_of<__half>(params) : kernel_of<__nv_bfloat16>(params),
        {static_cast<unsigned>(blocks), kThreads, layout(params, head_of(p)).bytes}, static_cast<cudaStream_t>(stream),
        params);
}

}  // namespace heddle::cuda::sm80::select_blocks
