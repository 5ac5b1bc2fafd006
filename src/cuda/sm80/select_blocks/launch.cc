#include "cuda/sm80/select_blocks/host.h"

#include "cuda/common/attention/log2.h"
#include "cuda/common/device.h"
#include "cuda/sm80/select_blocks/variants.h"

namespace heddle::cuda::sm80::select_blocks {
namespace {

const Variant& variant_for(const SelectProblem& p) {
  return first_that(variants(p.dtype), [&](const Variant& v) { return p.D <= v.head; });
}

std::size_t shared_bytes(const SelectProblem& p, const Params& params) {
  return layout(params, variant_for(p).head).bytes;
}

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
  const bool can = p.lse && p.narrow() == 1 && p.G <= kRows / kWarps && p.D <= kMostHeadOfCopies && p.slots <= kWarp;
  if (can && p.B * p.Hkv * p.Sq <= 2 * current_device().multiprocessors) {
    const Params params = params_of(p, true);
    if (static_cast<std::int64_t>(shared_bytes(p, params)) <= current_device().shared_memory) return params;
  }
  return params_of(p, false);
}

}  // namespace

Cut cut_of(const SelectProblem& p) {
  const Params params = params_of(p);
  return {params.positions, params.copies, shared_bytes(p, params)};
}

void launch(const SelectProblem& p, void* stream) {
  const Params params = params_of(p);
  variant_for(p).launch(params, static_cast<unsigned>(p.B * p.Hkv * params.position_tiles), shared_bytes(p, params),
                        static_cast<cudaStream_t>(stream));
}

std::span<const Variant> variants(DType type) { return variants_of<Instance, kTypes, kVariants>(type); }

}  // namespace heddle::cuda::sm80::select_blocks
