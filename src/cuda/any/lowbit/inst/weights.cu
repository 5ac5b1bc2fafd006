// Blocks of packed weights as floats: which kernel, by their order.
#include "core/check.h"
#include "cuda/any/lowbit/fragments.cuh"
#include "cuda/any/lowbit/launch.h"
#include "cuda/common/launch.cuh"
#include "cuda/linear.h"
#include "cuda/lowbit.h"
#include "lowbit/formats.h"

namespace heddle::cuda {
namespace {

using namespace any::lowbit;
namespace lowbit = heddle::lowbit;

bool in_matrix(const LinearProblem& p) { return p.order == WeightOrder::matrix || p.order == WeightOrder::matrix8; }

template <class Block>
void decode_fragments(const LinearProblem& p, const WeightBlock& wanted, const Weights& out, cudaStream_t stream) {
  const auto columns = static_cast<int>((wanted.columns + lowbit::kBlockColumns - 1) / lowbit::kBlockColumns);
  const Grid grid{.blocks = static_cast<unsigned>(p.fragments.row_blocks * columns), .threads = kFragmentThreads};
  start("unpack_weights", decode_fragments_kernel<Block>, grid, stream,
        reinterpret_cast<const Block*>(p.fragment_data + p.fragments.blocks),
        reinterpret_cast<const float*>(p.fragment_data), p.fragments.column_blocks, p.gated, wanted, columns, out,
        is_wide(out));
}

}  // namespace

std::string refuse_decode(const LinearProblem& p) {
  if (p.order == WeightOrder::dense) return "weights in order dense are of another dtype than x, and are not converted";
  const lowbit::Element element = p.format.element;
  if (in_matrix(p) || element == lowbit::Element::e2m1 || element == lowbit::Element::e2m1_row) return "";
  return text("weights of ", lowbit::name_of(p.format), " in order ", name_of(p.order),
              " are not unpacked: pack them in order matrix");
}

void decode_weights(const LinearProblem& p, const WeightBlock& wanted, const Weights& out, void* stream) {
  if (wanted.rows == 0 || wanted.columns == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (p.order == WeightOrder::fragments16) return decode_fragments<lowbit::FragmentBlock>(p, wanted, out, on);
  if (p.order == WeightOrder::fragments8) return decode_fragments<lowbit::FragmentBlock8>(p, wanted, out, on);
  lowbit::Matrix m = p.matrix;
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
