// What is refused on device tensors, with which words, before anything is written.
#include <gtest/gtest.h>

#include "gpu/device_call.h"
#include "heddle/error.h"

namespace heddle::kit {
namespace {

class GpuArguments : public ::testing::Test {
 protected:
  GpuArguments() : at_(attention_case("round_s64_d64_bf16")), host_(attention_case("round_s64_d64_bf16")) {}

  // Runs `call`, which must be refused with a message that has `words` in it, the outputs untouched.
  void refused(const DeviceCall& call, const std::string& words) {
    try {
      call.run();
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what() << "\nlacks: " << words;
    }
    EXPECT_TRUE(same_bits(at_.read(), ForwardOutputs{at_.host_o, at_.host_lse})) << "outputs were written";
  }

  DeviceCase at_;
  CaseData host_;
};

TEST_F(GpuArguments, Devices) {
  DeviceCall call = at_.call;
  call.k = host_.k.view();
  refused(call, "k is on another device than q");
  call = at_.call;
  call.o = host_.q.view();
  refused(call, "o is on another device than q");
  call = at_.call;
  call.lse = at_.host_lse.view();
  refused(call, "lse is on another device than q");
  HostTensor sink = HostTensor::input(DType::f32, {2});
  call = at_.call;
  call.options.sink = sink.view();
  refused(call, "sink is on another device than q");
  HostTensor mask = HostTensor::input(DType::boolean, {1, 1, 1, 64});
  call = at_.call;
  call.options.mask = mask.view();
  refused(call, "mask is on another device than q");
  HostTensor used = HostTensor::input(DType::i32, {2});
  call = at_.call;
  call.options.seqused_k = used.view();
  refused(call, "seqused_k is on another device than q");
}

TEST_F(GpuArguments, PackedLengthsAreNotRead) {
  const DeviceCase packed(attention_case("feature_packed_f16"));
  DeviceCall call = packed.call;
  call.options.max_seqlen_q = 0;
  refused(call, "max_seqlen_q is 0: cu_seqlens_q is on a GPU, where lengths are not read");
  call = packed.call;
  call.options.max_seqlen_k = 0;
  refused(call, "max_seqlen_k is 0: cu_seqlens_k is on a GPU, where lengths are not read");
}

TEST_F(GpuArguments, CandidatesOfTheCpuAreRefused) {
  DeviceCall call = at_.call;
  call.options.force = "reference";
  refused(call,
          "force is 'reference', which cannot serve this call: it runs on another device than the tensors are on");
  call.options.force = "nonsense";
  refused(call, "force is 'nonsense': the candidates are ");
}

TEST_F(GpuArguments, Workspace) {
  AttentionCase spec{.H = 4, .Hkv = 4, .Sq = 2304, .Sk = 2304, .D = 64, .Dv = 64};
  spec.dtype = DType::bf16;
  spec.causal = Causal::bottom_right;
  DeviceCase large(spec);
  bool any = false;
  for (const std::string& candidate : large.runner.candidates(Pass::forward)) {
    large.call.options.force = candidate;
    const std::size_t bytes = large.call.workspace();
    if (bytes == 0) continue;
    any = true;
    const DeviceStream stream;
    EXPECT_THROW(large.call.launch(stream, DeviceMemory()), Error) << candidate;
    const DeviceMemory memory(bytes + 64);
    DeviceCall& call = large.call;
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {static_cast<std::byte*>(memory.data()) + 4, bytes};
    EXPECT_THROW(attention_forward(call.q, call.k, call.v, call.o, call.lse, call.options, runtime), Error);
  }
  if (!any) GTEST_SKIP() << "no candidate needs a workspace here";
}

}  // namespace
}  // namespace heddle::kit
