// One forward call on device tensors, as the tests of the GPU put it together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "kernels/candidates.h"
#include "kit/device_mirror.h"

namespace heddle::kit {

struct DeviceCall {
  TensorView q, k, v, o, lse;
  AttentionOptions options;

  std::size_t workspace() const { return attention_forward_workspace(q, k, v, options); }
  // Puts the call on the stream; `memory` has at least workspace() bytes.
  void launch(const DeviceStream& stream, const DeviceMemory& memory) const {
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    attention_forward(q, k, v, o, lse, options, runtime);
  }
  void run() const {
    const DeviceStream stream;
    const DeviceMemory memory(workspace(), 0xFF);
    launch(stream, memory);
    stream.synchronize();
  }
};

// A case's call with outputs of its own.
struct DeviceCase {
  CaseRunner runner;
  HostTensor host_o, host_lse;  // poison until read()
  DeviceTensor o, lse;
  DeviceCall call;

  explicit DeviceCase(const AttentionCase& spec, const std::string& candidate = "", std::uint64_t seed = 1)
      : runner(spec, seed, Device::cuda),
        host_o(runner.data().new_o()),
        host_lse(runner.data().new_lse()),
        o(host_o),
        lse(host_lse),
        call{runner.inputs().q, runner.inputs().k, runner.inputs().v, o.view(), lse.view(), runner.inputs().options} {
    call.options.force = candidate;
  }

  void poison() {
    o.write(runner.data().new_o());
    lse.write(runner.data().new_lse());
  }
  ForwardOutputs read() const {
    ForwardOutputs out{host_o, host_lse};
    o.read(out.o);
    lse.read(out.lse);
    return out;
  }
};

inline bool same_bits(const ForwardOutputs& x, const ForwardOutputs& y) {
  return x.o.same_bits(y.o) && x.lse.same_bits(y.lse);
}

// Bits alone would let NaN pass, which is as repeatable as anything. The lse of a row without keys is -inf.
inline void expect_finite(const ForwardOutputs& out) {
  for (const HostTensor* x : {&out.o, &out.lse}) {
    const std::vector<double> values = x->values();
    const auto bad = std::ranges::find_if_not(values, [&](double value) {
      return std::isfinite(value) || (x == &out.lse && value == -std::numeric_limits<double>::infinity());
    });
    ASSERT_EQ(bad, values.end()) << (x == &out.o ? "o" : "lse") << " has " << *bad << " at element "
                                 << bad - values.begin();
  }
}

// Part `begin` .. `begin + count` of a view's extent.
inline TensorView part(const TensorView& view, int axis, std::int64_t begin, std::int64_t count) {
  TensorView out = view;
  out.data =
      static_cast<std::byte*>(view.data) + begin * view.stride[axis] * static_cast<std::int64_t>(size_of(view.dtype));
  out.shape[axis] = count;
  return out;
}

}  // namespace heddle::kit
