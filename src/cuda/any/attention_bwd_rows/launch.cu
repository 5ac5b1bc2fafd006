// Which instantiation, and the launch.
#include "cuda/any/attention_bwd_rows/kernel.cuh"
#include "cuda/any/attention_bwd_rows/launch.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"

namespace heddle::cuda::any::attention_bwd_rows {
namespace {

using Kernel = void (*)(Params);

Kernel rows_kernel_for(const AttentionProblem& p) {
  if (p.dtype == DType::f32) return rows_kernel<float>;
  const bool half = p.dtype == DType::f16;
  if (rounds_d_o(p)) return half ? rows_kernel<float, __half> : rows_kernel<float, __nv_bfloat16>;
  return half ? rows_kernel<__half> : rows_kernel<__nv_bfloat16>;
}

}  // namespace

void launch_rows(const AttentionBackwardProblem& p, const Rows& rows, cudaStream_t stream) {
  const std::int64_t piece = 16 / static_cast<std::int64_t>(size_of(p.o.dtype));
  const int lanes = p.Dv <= 8 * piece ? 8 : p.Dv <= 16 * piece ? 16 : 32;  // a piece each, where that is enough
  const Params params = {
      .problem = p,
      .rows = rows,
      .blocks_per_sequence = static_cast<unsigned>(round_up_to_tile(p.Sq) / block_rows(lanes)),
      .lanes = lanes,
      .in_pieces = p.Dv % piece == 0 && has_rows_of_16_bytes(p.o) && has_rows_of_16_bytes(p.d_o),
  };
  start("attention_backward", rows_kernel_for(p),
        {static_cast<unsigned>(p.B * p.H * params.blocks_per_sequence), kThreads}, stream, params);
  if (rows.largest == nullptr) return;
  Params of_rows = params;
  of_rows.blocks_per_sequence = static_cast<unsigned>((p.Sq + kThreads - 1) / kThreads);
  const auto large = p.dtype == DType::f32   ? large_rows_kernel<float>
                     : p.dtype == DType::f16 ? large_rows_kernel<__half>
                                             : large_rows_kernel<__nv_bfloat16>;
  start("attention_backward", large, {static_cast<unsigned>(p.B * p.H * of_rows.blocks_per_sequence), kThreads}, stream,
        of_rows);
}

void launch_sink_gradient(const AttentionBackwardProblem& p, const Rows& rows, cudaStream_t stream) {
  start("attention_backward", sink_gradient_kernel, {static_cast<unsigned>(p.H), kSinkThreads}, stream,
        Params{.problem = p, .rows = rows, .blocks_per_sequence = 0, .lanes = 0, .in_pieces = false});
}

}  // namespace heddle::cuda::any::attention_bwd_rows
