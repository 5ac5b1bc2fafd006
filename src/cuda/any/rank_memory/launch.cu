// What a launch is told, which instantiation, and the launches.
#include <algorithm>

#include "core/check.h"
#include "cuda/any/rank_memory/kernel.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/rank_memory.h"

namespace heddle::cuda {
namespace {

using namespace any::rank_memory;

constexpr const char* kWhat = "distributed rows";

// More than are at work at once; threads go round.
unsigned blocks_for(std::int64_t work, std::int64_t of_block) {
  const std::int64_t enough = std::int64_t{16} * current_device().multiprocessors;
  return static_cast<unsigned>(std::min((work + of_block - 1) / of_block, enough));
}

bool heads_are_one_row(const TensorView& x) { return x.stride[3] == 1 && x.stride[2] == x.shape[3]; }

Side side_of(const TensorView& x) {
  const auto size = static_cast<std::int64_t>(size_of(x.dtype));
  return {static_cast<std::byte*>(x.data), x.stride[0] * size, x.stride[1] * size, x.stride[2] * size,
          x.stride[3] * size};
}

// Whether every row of a head begins at a multiple of `bytes`, a power of two.
bool begins_at(const Params& p, const Side& side, std::int64_t bytes) {
  std::int64_t all = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(side.data)) | side.stride_row;
  if (p.batch > 1) all |= side.stride_b;
  if (p.heads > 1) all |= side.stride_head;
  return (all & (bytes - 1)) == 0;
}

// Copies go in the largest units that both tensors allow.
int unit_of(const Params& p, const TensorView& from, const TensorView& to) {
  const int size = static_cast<int>(size_of(from.dtype));
  const bool side_by_side = (from.stride[3] == 1 && to.stride[3] == 1) || from.shape[3] == 1;
  if (!side_by_side) return size;
  for (const int bytes : {16, 8, 4}) {
    if (bytes > size && std::int64_t{p.units} * size % bytes == 0 && begins_at(p, p.from, bytes) &&
        begins_at(p, p.to, bytes)) {
      return bytes;
    }
  }
  return size;
}

using Kernel = void (*)(Params);

Kernel kernel_for(DType from, DType to, bool add, int unit) {
  if (add) return move_kernel<float, float, true>;
  if (from != to)
    return to == DType::f16 ? move_kernel<float, __half, false> : move_kernel<float, __nv_bfloat16, false>;
  if (unit == 16) return move_kernel<uint4, uint4, false>;
  if (unit == 8) return move_kernel<uint2, uint2, false>;
  return unit == 4 ? move_kernel<unsigned, unsigned, false> : move_kernel<unsigned short, unsigned short, false>;
}

}  // namespace

void fill_floats(float* x, std::int64_t count, float value, void* stream) {
  start(kWhat, fill_kernel, {blocks_for(count, kThreads), kThreads}, static_cast<cudaStream_t>(stream), x, count,
        value);
}

void add_floats(float* sum, const float* x, std::int64_t count, void* stream) {
  start(kWhat, add_kernel, {blocks_for(count, kThreads), kThreads}, static_cast<cudaStream_t>(stream), sum, x, count);
}

void move_rows(const TensorView& from, const TensorView& to, std::span<const RowMove> moves, bool add, void* stream) {
  Params p = {};
  p.from = side_of(from);
  p.to = side_of(to);
  p.batch = from.shape[0];
  p.heads = static_cast<int>(from.shape[2]);
  p.units = static_cast<int>(from.shape[3]);
  if (p.batch == 0 || p.heads == 0 || p.units == 0) return;
  if (heads_are_one_row(from) && heads_are_one_row(to)) {
    p.units *= p.heads;
    p.heads = 1;
  }
  const int size = static_cast<int>(size_of(from.dtype));
  const int unit = add || from.dtype != to.dtype ? size : unit_of(p, from, to);
  if (unit > size) {
    p.units = p.units * size / unit;
    p.from.stride_unit = p.to.stride_unit = unit;
  }
  p.of_units = Divisor(static_cast<unsigned>(p.units));
  const Kernel kernel = kernel_for(from.dtype, to.dtype, add, unit);
  const auto launch = [&] {
    start(kWhat, kernel, {blocks_for(p.batch * p.rows, kWarps), kThreads}, static_cast<cudaStream_t>(stream), p);
    p.count = 0;
    p.rows = 0;
  };
  for (const RowMove& move : moves) {
    if (move.count == 0) continue;
    if (p.count == kMostMoves) launch();
    p.first[p.count] = p.rows;
    p.move[p.count] = move;
    ++p.count;
    p.rows += move.count;
  }
  launch();
}

void end_if(const int* failed, void* stream) {
  start(kWhat, end_if_kernel, {1, 1}, static_cast<cudaStream_t>(stream), failed);
}

}  // namespace heddle::cuda
