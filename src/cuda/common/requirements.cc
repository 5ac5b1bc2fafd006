#include "cuda/common/requirements.h"

#include "core/check.h"
#include "cuda/common/device.h"

namespace heddle::cuda {
namespace {

bool mappable(const Operand& x) {
  return has_rows_of_16_bytes(x) && x.stride_b >= 0 && x.stride_s >= 0 && x.stride_h >= 0;
}

}  // namespace

Refusal refuse_before_ampere() {
  const DeviceProperties& device = current_device();
  if (device.major == 0) return kNoGpu;
  if (device.major >= 8) return "";
  return text("it needs an Ampere GPU or a newer one (compute capability 8.0); this one has ", device.major, ".",
              device.minor);
}

Refusal refuse_other_than_hopper() {
  const DeviceProperties& device = current_device();
  if (device.major == 0) return kNoGpu;
  if (device.major == 9) return "";
  return text("it needs a Hopper GPU (compute capability 9.0); this one has ", device.major, ".", device.minor);
}

bool has_rows_of_16_bytes(const Operand& x) {
  const std::int64_t piece = 16 / static_cast<std::int64_t>(size_of(x.dtype));
  return x.alignment >= 16 && x.stride_d == 1 && x.stride_b % piece == 0 && x.stride_s % piece == 0 &&
         x.stride_h % piece == 0;
}

Refusal refuse_unmappable(const char* name, const Operand& x) {
  if (!x || mappable(x)) return "";
  return text(name, "'s rows must be contiguous, with address and strides in multiples of 16 bytes");
}

Refusal refuse_unmappable(const AttentionProblem& p) {
  if (p.B == 0 || p.q_rows == 0) return "";
  if (Refusal reason = refuse_unmappable("q", p.q); !reason.empty()) return reason;
  if (Refusal reason = refuse_unmappable("o", p.o); !reason.empty()) return reason;
  if (p.k_rows == 0) return "";
  if (Refusal reason = refuse_unmappable("k", p.k); !reason.empty()) return reason;
  return refuse_unmappable("v", p.v);
}

}  // namespace heddle::cuda
