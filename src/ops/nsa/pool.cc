// pool_keys and its gradient: check, ask each candidate, choose, launch.
#include <algorithm>
#include <limits>

#include "ops/attention/arguments.h"
#include "ops/nsa/choice.h"
#include "ops/nsa/nsa.h"
#include "ops/validate.h"
#include "problem/operand_of.h"

namespace heddle {
namespace {

constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();  // index data is 32-bit

// What errors call the tensors of keys and of pooled keys.
struct PoolNames {
  const char *x, *pooled;
  bool extends = false;
};

Indices indices_of(const Check& check, const TensorView& view, const char* name, std::int64_t length,
                   const PoolProblem& p, const PoolNames& names) {
  check.tensor(view, name, DType::i32, p.device, 1, names.x);
  check.require(view.shape[0] == length, name, " has ", view.shape[0], " entries: it must have ", length);
  check.require(view.stride[0] == 1 || view.shape[0] <= 1, name, " must be contiguous");
  check.readable_indices(view, name);
  return {static_cast<const std::int32_t*>(view.data), true};
}

void fill_pages(const Check& check, PoolProblem& p, const TensorView& x, const TensorView& table,
                const PoolNames& names) {
  check.tensor(table, "page_table", DType::i32, p.device, 2, names.x);
  check.require(table.stride[1] == 1 || table.shape[1] <= 1, "page_table's rows must be contiguous");
  check.readable_indices(table, "page_table");
  p.pages = x.shape[0];
  p.page_size = x.shape[1];
  check.require(p.page_size >= 1 && p.page_size % p.stride == 0, names.x, " has pages of ", p.page_size,
                " keys: it must be a multiple of stride, ", p.stride);
  check.require(table.shape[1] <= kMaxLength / p.page_size, "page_table has ", table.shape[1], " pages of ",
                p.page_size, " keys for a sequence: it must have fewer than 2^31 keys");
  p.B = table.shape[0];
  check.require(p.pages > 0 || table.elements() == 0, names.x, " is ", x, ": page_table names pages and there is none");
  p.S = table.shape[1] * p.page_size;
  p.N = table.shape[1] * p.pooled_page_size();
  p.page_table = {static_cast<const std::int32_t*>(table.data), true};
  p.page_table_stride = table.stride[0];
}

void fill(const Check& check, PoolProblem& p, const TensorView& x, const TensorView& pooled, const PoolOptions& options,
          const PoolNames& names) {
  const TensorView& cu = options.cu_seqlens;
  const bool packed = cu.given();
  const int rank = packed ? 3 : 4, row = rank - 3;
  check.require(x.given(), names.x, " is missing");
  check.require(x.dtype == DType::f32 || x.dtype == DType::f16 || x.dtype == DType::bf16, names.x, " is ",
                name_of(x.dtype), ": it must be float32, float16 or bfloat16");
  check.require(x.rank == rank, names.x, " has ", x.rank, " dimensions: it must be ",
                packed ? "[total, Hkv, D] with cu_seqlens" : "[B, S, Hkv, D]", "; found ", names.x, " ", x);
  check.addressable(x, names.x);
  check.require(options.stride >= 1, "stride is ", options.stride, ": it must be at least 1");
  check.require(options.block >= options.stride && options.block <= kMaxLength, "block is ", options.block,
                ": it must be from stride, ", options.stride, ", to 2^31 - 1");
  p.device = x.device;
  p.S = x.shape[row];
  p.H = x.shape[row + 1];
  p.D = x.shape[row + 2];
  p.block = options.block;
  p.stride = options.stride;
  check.require(p.S <= kMaxLength, names.x, " has ", p.S, " rows: lengths must be below 2^31");
  check.require(p.H >= 1 && p.D >= 1, names.x, " is ", x, ": it must have at least one head and one dimension");
  if (packed) {
    check.require(cu.rank == 1 && cu.shape[0] >= 1, "cu_seqlens is ", cu, ": it must be int32 [B + 1]");
    p.B = cu.shape[0] - 1;
    p.cu_seqlens = indices_of(check, cu, "cu_seqlens", cu.shape[0], p, names);
    p.N = p.S / p.stride;
  } else {
    p.B = x.shape[0];
    p.N = p.S < p.block ? 0 : (p.S - p.block) / p.stride + 1;
  }
  check.require(names.extends || !options.page_table.given(), "page_table is given: only a cache that grows has pages");
  if (options.page_table.given()) fill_pages(check, p, x, options.page_table, names);
  if (names.extends) {
    check.require(!packed, "cu_seqlens is given: a cache that grows has none");
    check.require(options.seqused.given(), "seqused is missing");
    check.require(options.appended >= 1, "appended is ", options.appended, ": it must be at least 1");
    p.appended = std::clamp<std::int64_t>(options.appended, 1, std::max<std::int64_t>(p.S, 1));
  } else {
    check.require(options.appended == 0, "appended is ", options.appended, ": it must be 0");
  }
  if (options.seqused.given()) p.seqused = indices_of(check, options.seqused, "seqused", p.B, p, names);
  // On a GPU index data is not read, because that would wait for the stream.
  if (p.device == Device::cpu) require_none(check, check_share(PoolIndices{p}, 0, 1, 1));
  check.tensor(pooled, names.pooled, x.dtype, p.device, rank, names.x);
  const bool paged = p.page_table.given;
  const std::int64_t wanted[] = {paged ? p.pages : p.B, paged ? p.pooled_page_size() : p.N, p.H, p.D};
  bool right = true;
  for (int i = 0; i < rank; ++i) right &= pooled.shape[i] == wanted[4 - rank + i];
  check.require(right || !packed, names.pooled, " is ", pooled, ": it must be [", p.N, ", ", p.H, ", ", p.D,
                "], total / stride rows for ", names.x, " ", x);
  check.require(right, names.pooled, " is ", pooled, ": it must be [", wanted[0], ", ", wanted[1], ", ", p.H, ", ", p.D,
                "], a row for each ", paged ? "stride of a page" : "complete block", " of ", names.x, " ", x);
  p.x = operand_of(x);
  p.pooled = operand_of(pooled);
}

void check_output(const Check& check, const TensorView& out, const char* name, const TensorView& in,
                  const char* in_name, const PoolOptions& options) {
  check.not_overlapping(out, name);
  const Named outputs[] = {{name, &out}};
  const Named inputs[] = {{in_name, &in},
                          {"cu_seqlens", &options.cu_seqlens},
                          {"seqused", &options.seqused},
                          {"page_table", &options.page_table}};
  check_apart(check, outputs, inputs);
}

void validate(const char* operation, const PoolProblem& p, const Runtime& runtime) {
  if (validates(runtime, p.device)) cuda::check_indices(operation, PoolIndices{p}, runtime.stream);
}

}  // namespace

PoolProblem checked_pool_problem(const Check& check, const TensorView& x, const TensorView& pooled,
                                 const PoolOptions& options, const char* pooled_name) {
  PoolProblem p;
  fill(check, p, x, pooled, options, {.x = "x", .pooled = pooled_name});
  check_output(check, pooled, pooled_name, x, "x", options);
  return p;
}

PoolBackwardProblem checked_pool_backward_problem(const Check& check, const TensorView& d_pooled, const TensorView& dx,
                                                  const PoolOptions& options) {
  PoolBackwardProblem p;
  fill(check, p, dx, d_pooled, options, {.x = "dx", .pooled = "d_pooled"});
  check_output(check, dx, "dx", d_pooled, "d_pooled", options);
  return p;
}

void pool_keys(const TensorView& x, const TensorView& pooled, const PoolOptions& options, const Runtime& runtime) {
  pool_keys(x, pooled, options, runtime, "pooled");
}

void pool_keys(const TensorView& x, const TensorView& pooled, const PoolOptions& options, const Runtime& runtime,
               const char* pooled_name) {
  const Check check("pool_keys");
  const PoolProblem p = checked_pool_problem(check, x, pooled, options, pooled_name);
  const PoolKernel& kernel = choose(check, p, wish_of<PoolProblem>(check, options.force), workers_of(runtime));
  validate("pool_keys", p, runtime);
  run(check, "pool_keys", kernel, p, runtime, 0);
}

void extend_pooled_keys(const TensorView& x, const TensorView& pooled, const PoolOptions& options,
                        const Runtime& runtime) {
  const Check check("extend_pooled_keys");
  PoolProblem p;
  fill(check, p, x, pooled, options, {.x = "x", .pooled = "k_pooled", .extends = true});
  check_output(check, pooled, "k_pooled", x, "x", options);
  const PoolKernel& kernel = choose(check, p, wish_of<PoolProblem>(check, options.force), workers_of(runtime));
  validate("extend_pooled_keys", p, runtime);
  run(check, "extend_pooled_keys", kernel, p, runtime, 0);
}

std::vector<Candidate> explain_pool_keys(const TensorView& x, const TensorView& pooled, const PoolOptions& options,
                                         const Runtime& runtime) {
  const Check check("explain_pool_keys", Data::to_come);
  return explained(checked_pool_problem(check, x, pooled, options), wish_of<PoolProblem>(check, options.force),
                   workers_of(runtime));
}

void pool_keys_backward(const TensorView& d_pooled, const TensorView& dx, const PoolOptions& options,
                        const Runtime& runtime) {
  const Check check("pool_keys_backward");
  const PoolBackwardProblem p = checked_pool_backward_problem(check, d_pooled, dx, options);
  const PoolBackwardKernel& kernel =
      choose(check, p, wish_of<PoolBackwardProblem>(check, options.force), workers_of(runtime));
  validate("pool_keys_backward", p, runtime);
  run(check, "pool_keys_backward", kernel, p, runtime, 0);
}

std::vector<Candidate> explain_pool_keys_backward(const TensorView& d_pooled, const TensorView& dx,
                                                  const PoolOptions& options, const Runtime& runtime) {
  const Check check("explain_pool_keys_backward", Data::to_come);
  return explained(checked_pool_backward_problem(check, d_pooled, dx, options),
                   wish_of<PoolBackwardProblem>(check, options.force), workers_of(runtime));
}

}  // namespace heddle
