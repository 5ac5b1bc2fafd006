// Calls of attention over lists of key blocks on the GPU, forward and backward.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "gpu/device_backward.h"
#include "heddle/sparse.h"
#include "kit/block_lists.h"

namespace heddle::kit {

struct SparseCall {
  TensorView q, k, v, o, lse;
  BlockLists lists;
  AttentionOptions options;

  std::vector<Candidate> explain() const { return explain_sparse_attention(q, k, v, lists, options); }
  void run() const {
    const DeviceStream stream;
    const DeviceMemory memory(sparse_attention_forward_workspace(q, k, v, lists, options), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    sparse_attention_forward(q, k, v, lists, o, lse, options, runtime);
    stream.synchronize();
  }
};

// Its gradients, of a forward that wrote o and lse.
struct SparseGradientCall {
  TensorView q, k, v, o, lse, d_o, d_lse;
  BlockLists lists;
  AttentionGradients gradients;
  AttentionOptions options;

  SparseGradientCall(const CaseRunner& there, const CaseLists& on_host, const TensorView& out,
                     const TensorView& out_lse, Gradients to)
      : q(there.inputs().q),
        k(there.inputs().k),
        v(there.inputs().v),
        o(out),
        lse(out_lse),
        d_o(there.inputs().d_o),
        d_lse(there.inputs().d_lse),
        lists(on_host.views),
        options(there.inputs().options),
        blocks_(on_host.blocks),
        counts_(on_host.counts),
        masks_(on_host.masks),
        mask_ids_(on_host.mask_ids),
        host_(std::move(to)),
        dq_(host_.dq),
        dk_(host_.dk),
        dv_(host_.dv),
        dsink_(host_.dsink) {
    lists.blocks = blocks_.view();
    lists.counts = counts_.view();
    lists.masks = masks_.view();
    lists.mask_ids = mask_ids_.view();
    options.mask = {};
    gradients = {dq_.view(), dk_.view(), dv_.view(), {}, dsink_.view()};
  }

  std::vector<Candidate> explain() const {
    return explain_sparse_attention_backward(q, k, v, lists, gradients, options);
  }
  // fill: what the workspace holds before.
  Gradients run(int fill) {
    const std::pair<DeviceTensor*, const HostTensor*> all[] = {
        {&dq_, &host_.dq}, {&dk_, &host_.dk}, {&dv_, &host_.dv}, {&dsink_, &host_.dsink}};
    Gradients out = host_;
    HostTensor* const outs[] = {&out.dq, &out.dk, &out.dv, &out.dsink};
    for (const auto& [device, poison] : all) {
      if (poison->given()) device->write(*poison);
    }
    const DeviceStream stream;
    const DeviceMemory memory(sparse_attention_backward_workspace(q, k, v, lists, gradients, options), fill);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    sparse_attention_backward(q, k, v, lists, o, lse, d_o, d_lse, gradients, options, runtime);
    stream.synchronize();
    for (std::size_t n = 0; n < 4; ++n) {
      if (outs[n]->given()) all[n].first->read(*outs[n]);
    }
    return out;
  }

 private:
  const DeviceTensor blocks_, counts_, masks_, mask_ids_;
  const Gradients host_;  // poison
  DeviceTensor dq_, dk_, dv_, dsink_;
};

// "3, the first one at 17: 0.5 and 0.25"
inline std::string differences(const HostTensor& one, const HostTensor& other) {
  const std::vector<double> x = one.values(), y = other.values();
  std::size_t count = 0, first = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (x[n] == y[n] || (x[n] != x[n] && y[n] != y[n])) continue;
    if (count++ == 0) first = n;
  }
  return count == 0 ? "none" : text(count, ", the first one at ", first, ": ", x[first], " and ", y[first]);
}

}  // namespace heddle::kit
