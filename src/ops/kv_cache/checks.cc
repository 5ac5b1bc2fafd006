#include "ops/kv_cache/checks.h"

#include <algorithm>

#include "core/overlap.h"

namespace heddle {
namespace {

constexpr std::int64_t kMaxHeadSize = 256;

}  // namespace

void check_data(const Check& check, const TensorView& view, const char* name, const char* layout, const First& first,
                bool narrow) {
  check.require(view.given(), name, " is missing");
  check.require(view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16 ||
                    (narrow && view.dtype == DType::f8e4m3),
                name, " is ", name_of(view.dtype), ": it must be float32, float16 or bfloat16",
                narrow ? " (or float8_e4m3fn beside 16-bit rows)" : "");
  check.require(view.device == first.device, name, " is on another device than ", first.name);
  check.require(view.rank == 4, name, " has ", view.rank, " dimensions: it must be ", layout, "; found ", name, " ",
                view);
  check.addressable(view, name);
  check.require(view.shape[3] <= kMaxHeadSize, name, " has head size ", view.shape[3], ": it must be at most ",
                kMaxHeadSize, "; found ", name, " ", view);
}

const std::int32_t* check_indices(const Check& check, const TensorView& view, const char* name, std::int64_t count,
                                  const First& first) {
  check.tensor(view, name, DType::i32, first.device, 1, first.name);
  check.require(view.shape[0] == count, name, " has ", view.shape[0], " entries: it must have ", count);
  check.require(view.stride[0] == 1 || count <= 1, name, " must be contiguous");
  check.readable_indices(view, name);
  return static_cast<const std::int32_t*>(view.data);
}

void check_apart(const Check& check, const TensorView& written, const char* written_name, const TensorView& read,
                 const char* read_name) {
  check.require(!read.given() || !may_share_memory(written, read), written_name, " shares memory with ", read_name,
                ", which is read meanwhile: give it memory of its own");
}

RotaryTables check_rotary(const Check& check, const Rotary& rotary, const TensorView& data, const First& first) {
  const char* name = first.name;
  check.require(rotary.cos.given() && rotary.sin.given(), rotary.cos.given() ? "sin" : "cos",
                " is missing: rotary needs both cos and sin");
  check.require(rotary.cos.dtype == DType::f32 || rotary.cos.dtype == data.dtype, "cos is ", name_of(rotary.cos.dtype),
                ": it must be float32 or ", name, "'s dtype, ", name_of(data.dtype));
  check.tensor(rotary.cos, "cos", rotary.cos.dtype, first.device, 2, name);
  check.tensor(rotary.sin, "sin", rotary.cos.dtype, first.device, 2, name);
  check.require(rotary.sin.shape == rotary.cos.shape, "sin is ", rotary.sin, ": it must have the shape of cos, ",
                rotary.cos);
  const std::int64_t dims = 2 * std::min(rotary.cos.shape[1], kMaxHeadSize);
  check.require(dims <= data.shape[3], "cos has ", rotary.cos.shape[1], " columns, for R = 2 * ", rotary.cos.shape[1],
                " rotated dimensions: R must be at most ", name, "'s head size, ", data.shape[3]);
  RotaryTables tables;
  tables.cos = static_cast<const std::byte*>(rotary.cos.data);
  tables.sin = static_cast<const std::byte*>(rotary.sin.data);
  tables.dtype = rotary.cos.dtype;
  tables.cos_row = rotary.cos.stride[0];
  tables.cos_column = rotary.cos.stride[1];
  tables.sin_row = rotary.sin.stride[0];
  tables.sin_column = rotary.sin.stride[1];
  tables.positions = rotary.cos.shape[0];
  tables.dims = dims;
  tables.interleaved = rotary.interleaved;
  check.require(tables.positions > 0 || data.elements() == 0, "cos has no rows, and ", name, " has some to rotate");
  return tables;
}

}  // namespace heddle
