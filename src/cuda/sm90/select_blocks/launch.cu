// Which instantiation, and the launch.
#include <algorithm>
#include <bit>

#include "cuda/common/device.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/select_blocks/host.h"
#include "cuda/sm90/select_blocks/kernel.cuh"

namespace heddle::cuda::sm90::select_blocks {

Cut cut_of(const SelectProblem& p) {
  return {std::max(0, static_cast<int>(std::bit_width(static_cast<unsigned>(p.G))) - 2)};
}

std::int64_t items_of(const SelectProblem& p) { return p.Hkv * sparse::tiles_of_rows(p, cut_of(p).of_cta()); }

void launch(const SelectProblem& p, void* stream) {
  Params params{};
  const Cut cut = cut_of(p);
  params.problem = p;
  params.tiles = static_cast<int>(sparse::tiles_of_rows(p, cut.of_cta()));
  params.items = static_cast<int>(items_of(p));
  if (params.items == 0) return;
  const auto bytes = static_cast<std::int64_t>(size_of(p.dtype));
  params.q_row = p.q.stride_s * bytes;
  params.q_head = p.q.stride_h * bytes;
  params.q_half = params.q_head << cut.halvings;
  params.scale_log2 = p.scale * kLog2e;
  params.k = make_tensor_map(p.k.data, p.k.dtype,
                             TensorMapShape<4>{.extent = {p.D, p.k_rows, p.Hkv, p.cu_seqlens_k.given ? 1 : p.B},
                                               .stride = {p.k.stride_s, p.k.stride_h, p.k.stride_b},
                                               .box = {64, kTileKeys, 1, 1}});
  const auto with = [&]<class C>(C) {
    start("select_blocks", select_kernel<C>,
          {static_cast<unsigned>(std::min(params.items, current_device().multiprocessors)), kThreads,
           sizeof(SharedMemory<C>)},
          static_cast<cudaStream_t>(stream), params);
  };
  const auto with_head = [&]<class T, int kHead>() {
    cut.halvings == 0   ? with(Config<T, kHead, 0>())
    : cut.halvings == 1 ? with(Config<T, kHead, 1>())
    : cut.halvings == 2 ? with(Config<T, kHead, 2>())
                        : with(Config<T, kHead, 3>());
  };
  const auto with_element = [&]<class T>(T) {
    p.D <= 64 ? with_head.template operator()<T, 64>() : with_head.template operator()<T, 128>();
  };
  p.dtype == DType::f16 ? with_element(__half()) : with_element(__nv_bfloat16());
}

}  // namespace heddle::cuda::sm90::select_blocks
