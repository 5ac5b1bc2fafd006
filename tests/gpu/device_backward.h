// One backward call on device tensors, after a forward that wrote its o and lse.
#pragma once

#include <array>
#include <string>
#include <utility>

#include "gpu/device_call.h"

namespace heddle::kit {

struct BackwardCall {
  DeviceCall forward;  // its o and lse are read here
  TensorView d_o, d_lse;
  AttentionGradients gradients;

  std::size_t workspace() const {
    return attention_backward_workspace(forward.q, forward.k, forward.v, gradients, forward.options);
  }
  void launch(const DeviceStream& stream, const Workspace& scratch) const {
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = scratch;
    attention_backward(forward.q, forward.k, forward.v, forward.o, forward.lse, d_o, d_lse, gradients, forward.options,
                       runtime);
  }
  void launch(const DeviceStream& stream, const DeviceMemory& memory) const {
    launch(stream, Workspace{memory.data(), memory.bytes()});
  }
  void run() const {
    const DeviceStream stream;
    const DeviceMemory memory(workspace(), 0xFF);
    launch(stream, memory);
    stream.synchronize();
  }
};

// The candidates of the GPU that take this call.
inline std::vector<std::string> candidates(const BackwardCall& call) {
  AttentionOptions options = call.forward.options;
  options.force.clear();
  std::vector<std::string> names;
  for (const Candidate& c : explain_attention_backward(call.forward.q, call.forward.k, call.forward.v, {}, options)) {
    if (c.supported && c.method != "reference") names.push_back(c.name);
  }
  return names;
}

// A case's backward with gradients of its own, and o and lse from the forward that runs by itself.
struct BackwardCase {
  DeviceCase forward;
  Gradients host;  // poison
  DeviceTensor dq, dk, dv, dbias, dsink;
  BackwardCall call;

  explicit BackwardCase(const AttentionCase& spec, std::uint64_t seed = 1)
      : forward(spec, "", seed),
        host(forward.runner.data().new_gradients()),
        dq(host.dq),
        dk(host.dk),
        dv(host.dv),
        dbias(host.dbias),
        dsink(host.dsink),
        call{forward.call,
             forward.runner.inputs().d_o,
             forward.runner.inputs().d_lse,
             {dq.view(), dk.view(), dv.view(), dbias.view(), dsink.view()}} {
    forward.call.run();
  }

  void poison() {
    for (const auto& [device, poison] : pairs()) device->write(*poison);
  }
  Gradients read() {
    Gradients out = host;
    HostTensor* outs[] = {&out.dq, &out.dk, &out.dv, &out.dbias, &out.dsink};
    std::size_t n = 0;
    for (const auto& [device, poison] : pairs()) {
      if (poison->given()) device->read(*outs[n]);
      ++n;
    }
    return out;
  }

 private:
  std::array<std::pair<DeviceTensor*, const HostTensor*>, 5> pairs() {
    return {{{&dq, &host.dq}, {&dk, &host.dk}, {&dv, &host.dv}, {&dbias, &host.dbias}, {&dsink, &host.dsink}}};
  }
};

inline bool same_bits(const Gradients& x, const Gradients& y) {
  return x.dq.same_bits(y.dq) && x.dk.same_bits(y.dk) && x.dv.same_bits(y.dv) && x.dbias.same_bits(y.dbias) &&
         x.dsink.same_bits(y.dsink);
}

// What is left of that where sums take any order: a few last places, seen over a whole tensor. NaN is not close.
inline bool close(const Gradients& x, const Gradients& y) {
  const std::pair<const HostTensor*, const HostTensor*> pairs[] = {
      {&x.dq, &y.dq}, {&x.dk, &y.dk}, {&x.dv, &y.dv}, {&x.dbias, &y.dbias}, {&x.dsink, &y.dsink}};
  return std::ranges::all_of(pairs, [](const auto& pair) {
    if (!pair.first->given()) return true;
    double difference = 0, size = 0;
    const std::vector<double> first = pair.first->values(), second = pair.second->values();
    for (std::size_t n = 0; n < first.size(); ++n) {
      difference += (first[n] - second[n]) * (first[n] - second[n]);
      size += first[n] * first[n];
    }
    return difference <= 0.005 * 0.005 * size;
  });
}

inline void expect_finite(const Gradients& out) {
  for (const HostTensor* x : {&out.dq, &out.dk, &out.dv, &out.dbias, &out.dsink}) {
    if (!x->given()) continue;
    EXPECT_EQ(x->damage(), "");
    const std::vector<double> values = x->values();
    const auto bad = std::ranges::find_if_not(values, [](double value) { return std::isfinite(value); });
    ASSERT_EQ(bad, values.end()) << "a gradient has " << *bad << " at element " << bad - values.begin();
  }
}

}  // namespace heddle::kit
