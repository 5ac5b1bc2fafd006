// A step of native sparse attention with its tensors on the GPU.
#pragma once

#include <cstddef>

#include "heddle/nsa.h"
#include "kit/device_mirror.h"
#include "kit/nsa_step_case.h"

namespace heddle::kit {

struct NsaStepOnGpu {
  DeviceTensor q, k_new, v_new, k, v, k_pooled, v_pooled, lengths, g_cmp, g_slc, g_swa;

  explicit NsaStepOnGpu(const NsaStepData& data)
      : q(data.q),
        k_new(data.k_new),
        v_new(data.v_new),
        k(data.k),
        v(data.v),
        k_pooled(data.k_pooled),
        v_pooled(data.v_pooled),
        lengths(data.lengths),
        g_cmp(data.g_cmp),
        g_slc(data.g_slc),
        g_swa(data.g_swa) {}
  NsaCache cache() const { return {k.view(), v.view(), k_pooled.view(), v_pooled.view(), lengths.view()}; }
  NsaGates gates() const { return {g_cmp.view(), g_slc.view(), g_swa.view()}; }

  std::size_t workspace(const DeviceTensor& out, const NsaStepOptions& options) const {
    return nsa_step_workspace(q.view(), k_new.view(), v_new.view(), cache(), gates(), out.view(), options);
  }
  void launch(const DeviceTensor& out, const NsaStepOptions& options, const DeviceStream& stream,
              const DeviceMemory& memory) const {
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    nsa_step(q.view(), k_new.view(), v_new.view(), cache(), gates(), out.view(), options, runtime);
  }
};

}  // namespace heddle::kit
