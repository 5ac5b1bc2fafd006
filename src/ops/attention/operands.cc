// q, k and v, and what has their shapes: outputs, gradients, statistics, scales.
#include "ops/attention/problem_builder.h"
#include "problem/operand_of.h"

namespace heddle {
namespace {

constexpr std::int64_t kMaxHeadSize = 256;

}  // namespace

Plane plane_of(const TensorView& view) {
  return {static_cast<std::byte*>(view.data), view.dtype, true, static_cast<std::uint16_t>(alignment_of(view))};
}

void ProblemBuilder::operands(AttentionProblem& p) const {
  check_.require(q_.given(), "q is missing");
  const bool narrow = q_.dtype == DType::f16 || q_.dtype == DType::bf16;
  check_.require(q_.dtype == DType::f32 || narrow || q_.dtype == DType::f8e4m3, "q is ", name_of(q_.dtype),
                 ": attention takes float32, float16, bfloat16 or float8_e4m3fn");
  const int q_rank = packed_q() ? 3 : 4, k_rank = packed_k() ? 3 : 4;
  check_.require(q_.rank == q_rank, "q has ", q_.rank, " dimensions: ",
                 packed_q() ? "with cu_seqlens_q it must be [total_q, H, D]" : "it must be [B, Sq, H, D]", "; found q ",
                 q_);
  check_.addressable(q_, "q");
  const DType k_dtype = narrow && k_.dtype == DType::f8e4m3 ? k_.dtype : q_.dtype;
  check_.tensor(k_, name_of(names_.k), k_dtype, q_.device, k_rank);
  check_.require(v_.dtype == k_.dtype, name_of(names_.v), " is ", name_of(v_.dtype), " and ", name_of(names_.k), " is ",
                 name_of(k_.dtype), ": they must be equal");
  check_.tensor(v_, name_of(names_.v), k_dtype, q_.device, k_rank);
  p.dtype = q_.dtype;
  p.device = q_.device;
  p.H = q_.shape[q_rank - 2];
  p.D = q_.shape[q_rank - 1];
  p.Hkv = k_.shape[k_rank - 2];
  p.Dv = v_.shape[k_rank - 1];
  check_.require(p.D >= 1 && p.D <= kMaxHeadSize, "q has head size ", p.D, ": it must be from 1 to ", kMaxHeadSize,
                 "; found q ", q_);
  check_.require(k_.shape[k_rank - 1] == p.D, name_of(names_.k), " has head size ", k_.shape[k_rank - 1], " and q has ",
                 p.D, ": they must be equal; found q ", q_, ", ", name_of(names_.k), " ", k_);
  check_.require(p.Dv >= 1 && p.Dv <= kMaxHeadSize, name_of(names_.v), " has head size ", p.Dv,
                 ": it must be from 1 to ", kMaxHeadSize, "; found ", name_of(names_.v), " ", v_);
  check_.require(p.H >= 1 && p.Hkv >= 1 && p.H % p.Hkv == 0, name_of(names_.k), " has ", p.Hkv, " heads and q has ",
                 p.H, ": q's heads must be a multiple of ", name_of(names_.k), "'s; found q ", q_, ", ",
                 name_of(names_.k), " ", k_);
  for (int i = 0; i < k_rank - 1; ++i) {
    check_.require(v_.shape[i] == k_.shape[i], name_of(names_.v), " has extent ", v_.shape[i], " in dimension ", i,
                   " and ", name_of(names_.k), " has ", k_.shape[i], ": they must be equal; found ", name_of(names_.k),
                   " ", k_, ", ", name_of(names_.v), " ", v_);
  }
  p.G = p.H / p.Hkv;
  p.q_rows = q_.shape[q_rank - 3];
  p.k_rows = capacity_ > 0 ? capacity_ : k_.shape[k_rank - 3];
  p.k_batches = packed_k() ? 1 : k_.shape[0];
  p.q = operand_of(q_);
  p.k = operand_of(k_);
  p.v = operand_of(v_);
}

// o or d_o.
Operand ProblemBuilder::output(const AttentionProblem& p, const TensorView& view, const char* name) const {
  if (options_.float32_out) {
    check_.require(view.dtype == DType::f32, name, " is ", name_of(view.dtype),
                   ": it must be float32, which was asked for");
  } else if (q_.dtype == DType::f8e4m3) {
    check_.require(view.dtype == DType::bf16 || view.dtype == DType::f16, name, " is ", name_of(view.dtype),
                   ": beside q of float8_e4m3fn it must be bfloat16 or float16, or float32 where that is asked for");
  } else {
    check_.require(view.dtype == q_.dtype, name, " is ", name_of(view.dtype), ": it must be ", name_of(q_.dtype),
                   q_.dtype == DType::f32 ? "" : ", q's dtype, or float32 where that is asked for");
  }
  check_.tensor(view, name, view.dtype, q_.device, q_.rank);
  for (int i = 0; i < q_.rank - 1; ++i) {
    check_.require(view.shape[i] == q_.shape[i], name, " is ", view, ": dimension ", i, " must be q's, ", q_.shape[i],
                   "; found q ", q_);
  }
  check_.require(view.shape[q_.rank - 1] == p.Dv, name, " is ", view, ": its last extent must be ", p.Dv,
                 " (v's head size)");
  return operand_of(view);
}

Operand ProblemBuilder::gradient(const TensorView& view, const char* name, const TensorView& model,
                                 const char* model_name, bool accumulate) const {
  check_.require(!accumulate || view.dtype == DType::f32 || q_.device == Device::cuda, name, " is ",
                 name_of(view.dtype), ": with accumulate it must be float32 on the CPU");
  check_.require(view.dtype == q_.dtype || view.dtype == DType::f32, name, " is ", name_of(view.dtype), ": it must be ",
                 name_of(q_.dtype), q_.dtype == DType::f32 ? "" : ", q's dtype, or float32");
  check_.tensor(view, name, view.dtype, q_.device, model.rank);
  for (int i = 0; i < model.rank; ++i) {
    check_.require(view.shape[i] == model.shape[i], name, " is ", view, ": it must have the shape of ", model_name,
                   ", ", model);
  }
  return operand_of(view);
}

// f32 [B, H, Sq], packed [H, total].
Plane ProblemBuilder::per_row(const AttentionProblem& p, const TensorView& view, const char* name) const {
  check_.tensor(view, name, DType::f32, q_.device, packed_q() ? 2 : 3);
  Plane plane = plane_of(view);
  if (packed_q()) {
    check_.require(view.shape[0] == p.H && view.shape[1] == q_.shape[0], name, " is ", view,
                   ": it must be [H, total_q] = [", p.H, ", ", q_.shape[0], "]");
    plane.stride_h = view.stride[0];
    plane.stride_i = view.stride[1];
  } else {
    check_.require(view.shape[0] == p.B && view.shape[1] == p.H && view.shape[2] == p.Sq, name, " is ", view,
                   ": it must be [B, H, Sq] = [", p.B, ", ", p.H, ", ", p.Sq, "]");
    plane.stride_b = view.stride[0];
    plane.stride_h = view.stride[1];
    plane.stride_i = view.stride[2];
  }
  return plane;
}

// The shape of `data` without its last extent, each extent that or 1.
Scales ProblemBuilder::scales(const TensorView& view, const char* name, const TensorView& data, const char* data_name,
                              bool packed) const {
  if (!view.given()) return {};
  check_.require(data.dtype == DType::f8e4m3, name, " is given and ", data_name, " is ", name_of(data.dtype),
                 ": scales belong to float8_e4m3fn");
  check_.tensor(view, name, DType::f32, q_.device, data.rank - 1);
  for (int i = 0; i < data.rank - 1; ++i) {
    check_.require(view.shape[i] == data.shape[i] || view.shape[i] == 1, name, " is ", view, ": dimension ", i,
                   " must be 1 or ", data_name, "'s, ", data.shape[i], "; found ", data_name, " ", data);
  }
  const auto stride = [&](int i) { return view.shape[i] == 1 ? 0 : view.stride[i]; };
  const int row = packed ? 0 : 1;
  return {static_cast<float*>(view.data), packed ? 0 : stride(0), stride(row), stride(row + 1), true};
}

void ProblemBuilder::all_scales(AttentionProblem& p) const {
  p.q_scale = scales(options_.q_scale, "q_scale", q_, "q", packed_q());
  p.k_scale = scales(options_.k_scale, "k_scale", k_, name_of(names_.k), packed_k());
  p.v_scale = scales(options_.v_scale, "v_scale", v_, name_of(names_.v), packed_k());
}

}  // namespace heddle
