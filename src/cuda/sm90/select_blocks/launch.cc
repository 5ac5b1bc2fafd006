#include "cuda/sm90/select_blocks/host.h"

#include <algorithm>
#include <bit>

#include "cuda/common/attention/log2.h"
#include "cuda/common/device.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/select_blocks/variants.h"

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
  const Variant& v =
      first_that(variants(p.dtype), [&](const Variant& v) { return p.D <= v.head && v.halvings == cut.halvings; });
  v.launch(params, std::min(params.items, current_device().multiprocessors), static_cast<cudaStream_t>(stream));
}

std::span<const Variant> variants(DType type) { return variants_of<Instance, kTypes, kVariants>(type); }

}  // namespace heddle::cuda::sm90::select_blocks
