// Validate mode: nothing is found where nothing is wrong; where it is off, nothing more is launched; and what is found
// is kept for its stream until it is taken.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "gpu/validate_calls.h"

namespace heddle::kit {
namespace {

TEST(GpuValidate, NoCaseIsBlamed) {
  const DeviceStream stream;
  for (const AttentionCase& spec : attention_cases()) {
    SCOPED_TRACE(spec.name);
    DeviceCase at(spec);
    std::size_t chosen = 0;
    for (const Candidate& candidate : at.runner.explain(Pass::forward)) chosen += candidate.chosen ? 1 : 0;
    if (chosen == 0) continue;
    const DeviceMemory memory(at.call.workspace(), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    runtime.validate = true;
    attention_forward(at.call.q, at.call.k, at.call.v, at.call.o, at.call.lse, at.call.options, runtime);
    ASSERT_EQ(last_error(stream.get()), "");
  }
}

TEST(GpuValidate, NoGradientIsBlamed) {
  const DeviceStream stream;
  for (const char* name : {"feature_packed_f16", "feature_packed_causal_bf16", "feature_packed_used_bf16",
                           "feature_used_both_causal_bf16", "feature_used_both_causal_f32"}) {
    SCOPED_TRACE(name);
    BackwardCase at(attention_case(name));
    const DeviceMemory memory(at.call.workspace(), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    runtime.validate = true;
    const DeviceCall& forward = at.call.forward;
    attention_backward(forward.q, forward.k, forward.v, forward.o, forward.lse, at.call.d_o, at.call.d_lse,
                       at.call.gradients, forward.options, runtime);
    ASSERT_EQ(last_error(stream.get()), "");
  }
}

// Runs a packed call whose offsets the test may change.
class OneCall {
 public:
  OneCall() : tensors_(packed()), side_(Device::cuda), offsets_(tensors_.cu_q) {
    q_ = side_(tensors_.q), k_ = side_(tensors_.k), v_ = side_(tensors_.v), o_ = side_(tensors_.o);
    options_ = tensors_.options(side_);
    options_.cu_seqlens_q = offsets_.view();
    runtime_ = side_.with([&] { return attention_forward_workspace(q_, k_, v_, options_); });
  }
  void launch(const DeviceStream& stream, bool validate = true) {
    runtime_.stream = stream.get();
    runtime_.validate = validate;
    attention_forward(q_, k_, v_, o_, {}, options_, runtime_);
  }
  void set(const std::vector<std::int64_t>& offsets) { offsets_.write(ints(offsets)); }

 private:
  Tensors tensors_;
  Side side_;
  DeviceTensor offsets_;
  TensorView q_, k_, v_, o_;
  AttentionOptions options_;
  Runtime runtime_;
};

TEST(GpuValidate, IsOneLaunchMoreOrNone) {
  const DeviceStream stream;
  OneCall call;
  Runtime standard;
  EXPECT_FALSE(standard.validate.has_value());
  const std::size_t off = DeviceGraph(stream, [&] { call.launch(stream, false); }).nodes();
  const std::size_t on = DeviceGraph(stream, [&] { call.launch(stream, true); }).nodes();
  EXPECT_GE(off, 1u);
  EXPECT_EQ(on, off + 1);
}

TEST(GpuValidate, StreamsHaveTheirOwn) {
  const DeviceStream first, second;
  OneCall call;
  call.set({0, 3, 5});
  call.launch(first, false);
  EXPECT_EQ(last_error(first.get()), "");
  call.launch(first);
  EXPECT_EQ(last_error(second.get()), "");
  first.synchronize();
  EXPECT_EQ(poll_error(second.get()), "");
  EXPECT_EQ(poll_error(first.get()), "[attention_forward] cu_seqlens_q ends at 5: it must end at q's first extent, 6");
  EXPECT_EQ(poll_error(first.get()), "");
}

TEST(GpuValidate, TheFirstIsKeptUntilItIsTaken) {
  const DeviceStream stream;
  OneCall call;
  call.set({2, 1, 5});
  call.launch(stream);
  stream.synchronize();
  call.set({0, 3, 5});
  call.launch(stream);
  EXPECT_EQ(last_error(stream.get()), "[attention_forward] cu_seqlens_q[0] is 2: it must be 0");
  call.launch(stream);
  EXPECT_EQ(last_error(stream.get()), "[attention_forward] cu_seqlens_q ends at 5: it must end at q's first extent, 6");
}

TEST(GpuValidate, ReplaysOfAGraphCheck) {
  const DeviceStream captured, replayed;
  OneCall call;
  const DeviceGraph graph(captured, [&] { call.launch(captured); });
  graph.replay(replayed);
  replayed.synchronize();
  EXPECT_EQ(poll_error(captured.get()), "");
  for (int round = 0; round < 3; ++round) {
    call.set({0, 4, 3});
    graph.replay(replayed);
    replayed.synchronize();
    EXPECT_EQ(poll_error(captured.get()),
              "[attention_forward] cu_seqlens_q decreases from 4 to 3 at entry 2: it must never decrease");
    call.set({0, 3, 6});
    graph.replay(replayed);
    replayed.synchronize();
    EXPECT_EQ(poll_error(captured.get()), "");
  }
}

}  // namespace
}  // namespace heddle::kit
