// Which kernels a quantisation takes, their grids, and what is read back.
#include <algorithm>
#include <bit>
#include <limits>

#include "cuda/any/lowbit/find.cuh"
#include "cuda/any/lowbit/host.h"
#include "cuda/common/launch.cuh"

namespace heddle::cuda {
namespace {

using namespace any::lowbit;
namespace lowbit = heddle::lowbit;

// Eight blocks of 256 threads fill a multiprocessor; threads take what is left in turns.
Grid grid_of(std::int64_t threads) {
  const std::int64_t most = std::int64_t{8} * current_device().multiprocessors;
  return {.blocks = static_cast<unsigned>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, most)),
          .threads = kThreads};
}

std::int64_t pieces(std::int64_t n, std::int64_t size) { return (n + size - 1) / size; }

// Of a group in registers: its size in units of 16 columns, if a warp's lanes can share it; else 0.
int lanes_of(const Matrix& out) {
  if (out.format.group == 0 || out.format.group % kColumns != 0) return 0;
  const std::int64_t lanes = out.format.group / kColumns;
  return lanes <= 32 && std::has_single_bit(static_cast<std::uint64_t>(lanes)) ? static_cast<int>(lanes) : 0;
}

// Threads of a group whose scales are searched, or that is a whole row.
int team_of(const QuantizeProblem& p) {
  if (p.out.format.group == 0 || p.out.format.group > 32 * kColumns) return kThreads;
  if (p.rule == lowbit::ScaleRule::four_six) return 2;
  return p.out.format.element == lowbit::Element::e2m1 ? 4 : 8;
}

void encode(const QuantizeProblem& p, Scratch* scratch, bool backwards, cudaStream_t stream) {
  const Matrix& out = p.out;
  const EncodeKernels kernels = encode_kernels(out.format.element);
  const int lanes = lanes_of(out);
  const std::int64_t code_bytes = kColumns * lowbit::bits_of(out.format.element) / 8;
  const Wide wide{is_wide(p.weights), is_aligned(out.codes, out.row_bytes, code_bytes)};
  if (!lowbit::searches(p.rule) && kernels.groups != nullptr && lanes > 0 && wide.weights && wide.codes && out.K > 0) {
    start("quantize", kernels.groups, grid_of(out.N * (out.K / kColumns)), stream, p, scratch,
          std::countr_zero(static_cast<unsigned>(lanes)), backwards);
  } else {
    const int team = team_of(p);
    start("quantize", kernels.any, grid_of(out.N * out.groups * team), stream, p, scratch, team, wide);
  }
}

void clear(Scratch* scratch, cudaStream_t stream) {
  check(cudaMemsetAsync(scratch, 0xFF, sizeof(Scratch), stream), "quantize");
  check(cudaMemsetAsync(&scratch->largest, 0, sizeof scratch->largest, stream), "quantize");
}

Scratch read_back(const Scratch* scratch, cudaStream_t stream) {
  Scratch found;
  check(cudaMemcpyAsync(&found, scratch, sizeof found, cudaMemcpyDeviceToHost, stream), "quantize");
  check(cudaStreamSynchronize(stream), "quantize");
  return found;
}

float read_float(const void* from, DType dtype, cudaStream_t stream) {
  std::uint32_t bits = 0;
  check(cudaMemcpyAsync(&bits, from, size_of(dtype), cudaMemcpyDeviceToHost, stream), "quantize");
  check(cudaStreamSynchronize(stream), "quantize");
  return load_element(&bits, dtype, 0);
}

}  // namespace

void start_quantize(const QuantizeProblem& p, void* workspace, void* on) {
  const auto stream = static_cast<cudaStream_t>(on);
  auto* const scratch = static_cast<Scratch*>(workspace);
  clear(scratch, stream);
  if (p.importance != nullptr) {
    const Grid grid{.blocks = static_cast<unsigned>(pieces(p.out.K, kThreads)), .threads = kThreads};
    start("quantize", importance_kernel, grid, stream, p.importance, p.out.K, scratch);
  }
  const bool own = p.out.format.global_scale && p.global_scale == 0.0f;
  if (own && p.out.N * p.out.K > 0) {
    start("quantize", largest_kernel, grid_of(p.out.N * pieces(p.out.K, 32)), stream, p, scratch, is_wide(p.weights));
  }
  encode(p, scratch, own, stream);  // backwards: the cache still holds what was read last
}

QuantizeFindings quantize(const QuantizeProblem& p, void* workspace, void* stream) {
  start_quantize(p, workspace, stream);
  const Scratch found = read_back(static_cast<Scratch*>(workspace), static_cast<cudaStream_t>(stream));
  return {found.largest, found.bad_importance};
}

FoundWeight first_weight_beyond(const QuantizeProblem& p, float limit, void* workspace, void* on) {
  const auto stream = static_cast<cudaStream_t>(on);
  auto* const scratch = static_cast<Scratch*>(workspace);
  clear(scratch, stream);
  start("quantize", first_beyond_kernel, grid_of(p.out.N * p.out.K), stream, p, scratch, limit);
  const auto at = static_cast<std::int64_t>(read_back(scratch, stream).first_beyond);
  FoundWeight found{.row = at / p.out.K, .column = at % p.out.K};
  found.value = read_float(p.weights.at(found.row, found.column), p.weights.dtype, stream);
  return found;
}

float importance_at(const QuantizeProblem& p, std::uint32_t column, void* stream) {
  return read_float(p.importance + column, DType::f32, static_cast<cudaStream_t>(stream));
}

void dequantize(const Matrix& m, const Weights& out, void* stream) {
  if (m.N == 0 || m.K == 0) return;
  const bool one_a_row = m.format.group == 0;
  const int shift = one_a_row ? 62 : std::bit_width(static_cast<std::uint64_t>(m.group)) - 1;
  const Wide wide{is_wide(out), is_aligned(m.codes, m.row_bytes, lowbit::bits_of(m.format.element))};
  start("dequantize", decode_kernel(m.format.element), grid_of(m.N * pieces(m.K, 8)), static_cast<cudaStream_t>(stream),
        m, out, shift, wide);
}

}  // namespace heddle::cuda
