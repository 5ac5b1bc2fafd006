#include "model/transformer_block_arguments.h"

namespace heddle {
namespace {

void check_device(const Check& check, const TransformerBlockOptions& options, const TensorView& view,
                  const char* name) {
  const bool gpu = options.device == Device::cuda;
  check.require(!view.given() || view.device == options.device, name, gpu ? " is on the CPU" : " is on a GPU",
                ": this block was made to run on ", gpu ? "a GPU" : "the CPU");
}

}  // namespace

void check_block_rows(const Check& check, const TransformerBlockOptions& options, const TensorView& view,
                      const char* name) {
  check_device(check, options, view, name);
  check.tensor(view, name, options.dtype, options.device, 2, "x");
  check.require(view.shape[1] == options.hidden, name, " is ", view, ": it must be [total, ", options.hidden,
                "], the block's hidden");
  check.require(view.shape[1] == 1 || view.stride[1] == 1, name, "'s last dimension has stride ", view.stride[1],
                ": it must be 1");
  check.addressable(view, name);
  check.require(view.shape[0] <= INT32_MAX, name, " has ", view.shape[0], " rows: at most 2^31 - 1 can be packed");
  if (options.device == Device::cpu) return;
  check.require(reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0, name, " must be aligned to 16 bytes");
  check.require(view.shape[0] <= 1 || (view.stride[0] >= options.hidden && view.stride[0] % 8 == 0), name,
                "'s rows are ", view.stride[0], " elements apart: on a GPU it must be a multiple of 8, and at least ",
                options.hidden);
}

void check_block_result(const Check& check, const TensorView& x, const TensorView& y) {
  check.require(x.shape == y.shape, "y is ", y, ": it must be ", x, ", as x");
  check.not_overlapping(y, "y");
}

void check_block_offsets(const Check& check, const TransformerBlockOptions& options, const TensorView& cu_seqlens) {
  check_device(check, options, cu_seqlens, "cu_seqlens");
  check.tensor(cu_seqlens, "cu_seqlens", DType::i32, options.device, 1, "x");
  check.require(cu_seqlens.contiguous(), "cu_seqlens must be contiguous");
  check.require(cu_seqlens.shape[0] >= 1, "cu_seqlens is empty: it holds one offset more than sequences");
  check.addressable(cu_seqlens, "cu_seqlens");
}

Offsets block_offsets(const TensorView& cu_seqlens, std::int64_t total, std::int64_t longest) {
  return {static_cast<const std::int32_t*>(cu_seqlens.data),
          cu_seqlens.shape[0] - 1,
          total,
          longest,
          IndexName::cu_seqlens,
          IndexName::x,
          IndexName::longest};
}

void require_block_offsets(const Check& check, const Offsets& offsets) {
  FirstBadIndex found;
  for (std::int64_t n = 0; n <= offsets.count; ++n) check_offset(offsets, n, CheckStep::q_offsets, found);
  require_none(check, found);
}

}  // namespace heddle
