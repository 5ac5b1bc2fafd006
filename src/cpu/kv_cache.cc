#include "cpu/kv_cache.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/dtypes.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/rotation.h"

namespace heddle::cpu {
namespace {

// Elements that a task should at least move: below this the hand-over costs more than the work.
constexpr std::int64_t kTaskElements = std::int64_t{1} << 14;

std::int64_t rows_of_task(std::int64_t row_elements) {
  return std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(row_elements, 1));
}

// Calls row(b, i) for every row of every sequence, in tasks of whole rows.
template <class Row>
void for_each_row(std::int64_t sequences, std::int64_t rows, std::int64_t row_elements, Executor& executor,
                  const Row& row) {
  const std::int64_t count = sequences * rows;
  if (count == 0) return;
  const std::int64_t chunk = rows_of_task(row_elements);
  struct Loop {
    std::int64_t count, chunk, rows;
    const Row& row;
  } loop{count, chunk, rows, row};
  parallel_for(executor, (count + chunk - 1) / chunk, [&loop](std::int64_t task, int) {
    const std::int64_t end = std::min(loop.count, (task + 1) * loop.chunk);
    for (std::int64_t r = task * loop.chunk; r < end; ++r) loop.row(r / loop.rows, r % loop.rows);
  });
}

// Row (b, i) of k or v, f16 or bf16, to an f8e4m3 cache. rotation: null for none.
void append_e4m3(const Rotation* rotation, const Operand& from, std::int64_t b, std::int64_t i, const Operand& to,
                 std::int64_t page, std::int64_t slot, const Scales& scales, bool finds_scale, std::int64_t heads,
                 std::int64_t dims) {
  for (std::int64_t h = 0; h < heads; ++h) {
    float x[kMaxRotaryDims];
    for (std::int64_t d = 0; d < dims; ++d) x[d] = load_element(from.at(b, i, h), from.dtype, d * from.stride_d);
    if (rotation != nullptr) rotation->turn(x);
    float scale;
    if (finds_scale) {
      float largest = 0.0f;
      for (std::int64_t d = 0; d < dims; ++d) largest = std::abs(x[d]) > largest ? std::abs(x[d]) : largest;  // no NaN
      *scales.place(page, slot, h) = scale = row_scale(largest);
    } else {
      scale = scales.at(0, 0, h);
    }
    for (std::int64_t d = 0; d < dims; ++d) {
      store_element(to.at(page, slot, h), to.dtype, d * to.stride_d, x[d] / scale);
    }
  }
}

void rotate(const RotaryProblem& p, const Runtime& runtime) {
  for_each_row(p.B, p.S, p.H * p.D, *runtime.executor, [&p](std::int64_t b, std::int64_t i) {
    const Rotation rotation(p.rotary, (p.offsets != nullptr ? p.offsets[b] : 0) + i);
    for (std::int64_t h = 0; h < p.H; ++h) {
      rotation.apply(p.x.at(b, i, h), p.x.stride_d, p.out.at(b, i, h), p.out.stride_d, p.x.dtype, p.D);
    }
  });
}

void append(const AppendProblem& p, const Runtime& runtime) {
  for_each_row(p.B, p.S, p.Hkv * (p.D + p.Dv), *runtime.executor, [&p](std::int64_t b, std::int64_t i) {
    const std::int64_t position = p.seqlens[b] + i;
    const std::int64_t page = p.page(b, position), slot = position % p.page_size;
    if (p.k_cache.dtype == DType::f8e4m3) {
      const Rotation rotation(p.rotary, position);
      append_e4m3(p.rotary.dims > 0 ? &rotation : nullptr, p.k_new, b, i, p.k_cache, page, slot, p.k_scale,
                  p.finds_k_scale, p.Hkv, p.D);
      append_e4m3(nullptr, p.v_new, b, i, p.v_cache, page, slot, p.v_scale, p.finds_v_scale, p.Hkv, p.Dv);
      return;
    }
    if (p.rotary.dims > 0) {
      const Rotation rotation(p.rotary, position);
      for (std::int64_t h = 0; h < p.Hkv; ++h) {
        rotation.apply(p.k_new.at(b, i, h), p.k_new.stride_d, p.k_cache.at(page, slot, h), p.k_cache.stride_d,
                       p.k_new.dtype, p.D);
      }
    } else {
      for (std::int64_t h = 0; h < p.Hkv; ++h) {
        copy_row(p.k_new.at(b, i, h), p.k_new.stride_d, p.k_cache.at(page, slot, h), p.k_cache.stride_d, p.k_new.dtype,
                 p.D);
      }
    }
    for (std::int64_t h = 0; h < p.Hkv; ++h) {
      copy_row(p.v_new.at(b, i, h), p.v_new.stride_d, p.v_cache.at(page, slot, h), p.v_cache.stride_d, p.v_new.dtype,
               p.Dv);
    }
  });
}

// Bytes a second of one thread, as an Intel Xeon of 2023 has them with AVX2: of rows that are turned, copied, and
// narrowed to e4m3 element by element.
constexpr double kTurned = 15e9, kCopied = 25e9, kNarrowed = 0.5e9;

double estimate_append(const AppendProblem& p, int workers) {
  const double rate = p.k_cache.dtype == DType::f8e4m3 ? kNarrowed : p.rotary.dims > 0 ? kTurned : kCopied;
  return p.bytes() / (rate * workers);
}

std::string in_tasks(std::int64_t row_elements, int workers) {
  return text(kernels().name, ", tasks of ", rows_of_task(row_elements), " rows, ", workers,
              workers == 1 ? " thread" : " threads");
}

}  // namespace

const RotaryKernel kRotary = {
    .name = "cpu",
    .method = "rotary",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = [](const RotaryProblem& p, int workers) { return p.bytes() / (kTurned * workers); },
    .workspace = no_workspace,
    .launch = rotate,
    .describe = [](const RotaryProblem& p, int workers) { return in_tasks(p.H * p.D, workers); },
};

const AppendKernel kKvCacheAppend = {
    .name = "cpu",
    .method = "append",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = estimate_append,
    .workspace = no_workspace,
    .launch = append,
    .describe = [](const AppendProblem& p, int workers) { return in_tasks(p.Hkv * (p.D + p.Dv), workers); },
};

}  // namespace heddle::cpu
