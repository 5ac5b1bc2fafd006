// Blocks of packed weights as floats: which kernel, by their order.
#include "core/check.h"
#include "cuda/any/lowbit/fragments.cuh"
#include "cuda/any/lowbit/host.h"
#include "cuda/any/lowbit/launch.h"
#include "cuda/common/launch.cuh"
#include "cuda/linear.h"
#include "lowbit/formats.h"

namespace heddle::cuda {
namespace {

using namespace any::lowbit;
namespace lowbit = heddle::lowbit;

template <class Fragments>
void decode_blocks(const LayerWeights& p, int block_bytes, const Fragments& fragments, const WeightBlock& wanted,
                   const Weights& out, cudaStream_t stream) {
  const auto columns = static_cast<int>((wanted.columns + Fragments::kColumns - 1) / Fragments::kColumns);
  const std::int64_t begin = wanted.row / lowbit::kBlockRows;
  const std::int64_t end = lowbit::blocks_of_rows(wanted.row + wanted.rows);
  const Grid grid{.blocks = static_cast<unsigned>((end - begin) * columns), .threads = kFragmentThreads};
  const FragmentData data{.blocks = p.fragments().data + p.fragments().layout.blocks,
                          .row_scales = reinterpret_cast<const float*>(p.fragments().data),
                          .column_blocks = p.fragments().layout.column_blocks,
                          .block_bytes = block_bytes,
                          .gated = p.gated};
  start("unpack_weights", decode_fragments_kernel<Fragments>, grid, stream, data, fragments, wanted, columns, out,
        is_wide(out));
}

void decode_fragments16(const LayerWeights& p, const WeightBlock& wanted, const Weights& out, cudaStream_t stream) {
  const lowbit::BlockLayout layout = lowbit::block_layout(p.format);
  const auto codes = [&]<lowbit::Element kElement>() {
    const CodeFragments<kElement> fragments{.groups = layout.groups, .scales = layout.scales, .zeros = layout.zeros};
    decode_blocks(p, layout.bytes, fragments, wanted, out, stream);
  };
  switch (p.format.element) {
    case lowbit::Element::int4:
      return codes.operator()<lowbit::Element::int4>();
    case lowbit::Element::nf4:
      return codes.operator()<lowbit::Element::nf4>();
    case lowbit::Element::fp4_bnb:
      return codes.operator()<lowbit::Element::fp4_bnb>();
    case lowbit::Element::int8:
      return codes.operator()<lowbit::Element::int8>();
    case lowbit::Element::e4m3:
      return codes.operator()<lowbit::Element::e4m3>();
    default:
      return decode_blocks(p, layout.bytes, E2M1Fragments{}, wanted, out, stream);
  }
}

void decode_fragments8(const LayerWeights& p, const WeightBlock& wanted, const Weights& out, cudaStream_t stream) {
  if (lowbit::has_scaled_blocks(p.format)) {
    return decode_blocks(p, sizeof(lowbit::ScaledBlock8), ScaledFragments8{}, wanted, out, stream);
  }
  decode_blocks(p, sizeof(lowbit::FragmentBlock8), Fragments8{}, wanted, out, stream);
}

}  // namespace

void decode_weights(const LayerWeights& p, const WeightBlock& wanted, const Weights& out, void* stream) {
  if (wanted.rows == 0 || wanted.columns == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (p.order == WeightOrder::fragments16) return decode_fragments16(p, wanted, out, on);
  if (p.order == WeightOrder::fragments8) return decode_fragments8(p, wanted, out, on);
  lowbit::Matrix m = p.matrix();
  const auto scale_bytes = static_cast<std::int64_t>(size_of(lowbit::scale_dtype(m.format.scale)));
  const std::int64_t group = m.format.group == 0 ? 0 : wanted.column / m.group;
  const std::int64_t first = wanted.row * m.groups + group;
  m.codes += wanted.row * m.row_bytes + wanted.column * lowbit::bits_of(m.format.element) / 8;
  m.scales = static_cast<std::byte*>(m.scales) + first * scale_bytes;
  if (m.zeros != nullptr) m.zeros += first;
  m.N = wanted.rows;
  m.K = wanted.columns;
  dequantize(m, out, stream);
}

}  // namespace heddle::cuda
