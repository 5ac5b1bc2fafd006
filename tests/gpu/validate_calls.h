// Calls whose index data tests spoil, on either side.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "gpu/device_backward.h"

namespace heddle::kit {

inline HostTensor ints(const std::vector<std::int64_t>& values, std::vector<std::int64_t> shape = {}) {
  if (shape.empty()) shape = {std::ssize(values)};
  HostTensor out = HostTensor::input(DType::i32, shape);
  for (std::int64_t n = 0; n < out.elements(); ++n)
    out.set(n, static_cast<double>(values[static_cast<std::size_t>(n)]));
  return out;
}

// Where a call's tensors are: those of the host, or mirrors of them.
class Side {
 public:
  explicit Side(Device device) : device_(device) {}

  TensorView operator()(const HostTensor& x) {
    if (device_ == Device::cpu || !x.given()) return x.view();
    return mirrors_.emplace_back(x).view();
  }
  // For a call on the GPU, a workspace of what `bytes` asks for; on the CPU it is refused before it would need one.
  Runtime with(const std::function<std::size_t()>& bytes) {
    Runtime runtime;
    if (device_ == Device::cpu) return runtime;
    scratch_ = DeviceMemory(bytes(), 0xFF);
    runtime.workspace = {scratch_.data(), scratch_.bytes()};
    runtime.stream = stream_.value().get();
    runtime.validate = true;
    return runtime;
  }
  const DeviceStream& stream() const { return stream_.value(); }

 private:
  Device device_;
  std::deque<DeviceTensor> mirrors_;
  DeviceMemory scratch_;
  std::optional<DeviceStream> stream_{std::in_place};
};

struct Tensors {
  HostTensor q, k, v, o, lse;
  HostTensor cu_q, cu_k, used_q, used_k, leftpad, table, rows;
  std::int64_t longest_q = 0, longest_k = 0;

  Tensors(std::vector<std::int64_t> q_shape, const std::vector<std::int64_t>& k_shape,
          const std::vector<std::int64_t>& lse_shape)
      : q(HostTensor::input(DType::f16, q_shape)),
        k(HostTensor::input(DType::f16, k_shape)),
        v(HostTensor::input(DType::f16, k_shape)),
        o(HostTensor::output(DType::f16, q_shape)),
        lse(HostTensor::output(DType::f32, lse_shape)) {}

  AttentionOptions options(Side& side) const {
    AttentionOptions out;
    out.cu_seqlens_q = side(cu_q);
    out.cu_seqlens_k = side(cu_k);
    out.max_seqlen_q = longest_q;
    out.max_seqlen_k = longest_k;
    out.seqused_q = side(used_q);
    out.seqused_k = side(used_k);
    out.cache_leftpad = side(leftpad);
    out.page_table = side(table);
    out.cache_batch_idx = side(rows);
    return out;
  }
  void forward(Side& side) const {
    const TensorView q_ = side(q), k_ = side(k), v_ = side(v), o_ = side(o), lse_ = side(lse);
    const AttentionOptions with = options(side);
    attention_forward(q_, k_, v_, o_, lse_, with,
                      side.with([&] { return attention_forward_workspace(q_, k_, v_, with); }));
  }
  void backward(Side& side) const {
    const TensorView q_ = side(q), k_ = side(k), v_ = side(v), o_ = side(o), lse_ = side(lse);
    const HostTensor dq = HostTensor::output(DType::f16, {6, 2, 64}), dk = HostTensor::output(DType::f16, {8, 1, 64}),
                     dv = HostTensor::output(DType::f16, {8, 1, 64});
    const AttentionGradients gradients{side(dq), side(dk), side(dv), {}, {}};
    const AttentionOptions with = options(side);
    attention_backward(q_, k_, v_, o_, lse_, side(o), {}, gradients, with,
                       side.with([&] { return attention_backward_workspace(q_, k_, v_, gradients, with); }));
  }
};

inline Tensors packed() {
  Tensors t({6, 2, 64}, {8, 1, 64}, {2, 6});
  t.cu_q = ints({0, 3, 6});
  t.cu_k = ints({0, 4, 8});
  t.longest_q = 3;
  t.longest_k = 4;
  return t;
}
inline Tensors dense() { return Tensors({2, 3, 2, 64}, {2, 5, 1, 64}, {2, 2, 3}); }
inline Tensors paged() {
  Tensors t({2, 3, 2, 64}, {4, 16, 1, 64}, {2, 2, 3});
  t.table = ints({0, 1, 2, 3}, {2, 2});
  return t;
}

}  // namespace heddle::kit
