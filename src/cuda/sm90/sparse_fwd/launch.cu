#include "cuda/common/sparse_fwd/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/sparse_fwd/host.h"
#include "cuda/sm90/sparse_fwd/together.cuh"

namespace heddle::cuda::sm90::sparse_fwd {
namespace {

using cuda::sparse_fwd::kOperation;
using cuda::sparse_fwd::Plan;
using cuda::sparse_fwd::plan_of;

void launch_together(const SparseProblem& p, const Plan& plan, void* memory, cudaStream_t stream) {
  if (plan.lists == 0 || p.H == 0) return;
  sparse::Arrays arrays(memory);
  together::Params params{};
  static_cast<cuda::sparse_fwd::Params&>(params) = params_of(p, plan, arrays);
  const auto map = [&](const Operand& x, std::int64_t size) {
    const std::int64_t rows = p.k_rows, batch = p.cu_seqlens_k.given ? 1 : p.B;
    return make_tensor_map(x.data, x.dtype,
                           TensorMapShape<4>{.extent = {size, rows, p.Hkv, batch},
                                             .stride = {x.stride_s, x.stride_h, x.stride_b},
                                             .box = {64, cuda::sparse_fwd::kTileKeys, 1, 1}});
  };
  params.k = map(p.k, p.D);
  params.v = map(p.v, p.Dv);
  params.tiles = static_cast<int>(plan.tiles_together);
  const auto with = [&]<class C>(C) {
    start(kOperation, together::together_kernel<C>,
          {static_cast<unsigned>(plan.tiles_together * plan.units), together::kThreads,
           sizeof(together::SharedMemory<C>)},
          stream, params);
  };
  const auto with_head = [&]<class T>(T) {
    plan.head == 64 ? with(together::Config<T, 64>()) : with(together::Config<T, 128>());
  };
  p.dtype == DType::f16 ? with_head(__half()) : with_head(__nv_bfloat16());
}

}  // namespace

void launch(const SparseProblem& problem, void* memory, void* stream) {
  const Plan plan = plan_of(problem, true);
  const auto on = static_cast<cudaStream_t>(stream);
  if (plan.way == cuda::sparse_fwd::Way::together) {
    launch_together(problem, plan, memory, on);
  } else {
    cuda::sparse_fwd::launch<true>(problem, plan, memory, on);
  }
}

}  // namespace heddle::cuda::sm90::sparse_fwd
