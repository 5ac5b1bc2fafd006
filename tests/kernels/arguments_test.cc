// What bad arguments are told, word for word where it matters, and that nothing is written before it is said.
#include "heddle/error.h"
#include "kernels/bad_arguments.h"

namespace heddle {
namespace {

TEST_P(BadArguments, AreRefusedWithTheirRule) {
  Call call;
  GetParam().spoil(call);
  const std::string operation = GetParam().backward ? "[attention_backward] " : "[attention_forward] ";
  try {
    GetParam().backward ? call.backward() : call.forward();
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(what.rfind(operation, 0), 0u) << what;
    EXPECT_NE(what.find(GetParam().message), std::string::npos) << what;
  }
  EXPECT_TRUE(call.untouched());
}

TEST(Arguments, TheUnspoiledCallsRun) {
  for (const auto& change : std::vector<std::function<void(Call&)>>{
           [](Call&) {}, [](Call& c) { c.pack(); }, [](Call& c) { c.page(); }, [](Call& c) { c.lse = {}; }}) {
    Call call;
    change(call);
    call.forward();
    EXPECT_FALSE(call.untouched());
  }
  Call call;
  call.backward();
  EXPECT_FALSE(call.untouched());
}

// Each row of a head size of 1 is one element, so that no address needs the last stride, however large it is.
TEST(Arguments, StridesOfSingleElementsSayNothing) {
  std::vector<float> plain;
  for (const std::int64_t stride : {std::int64_t{1}, INT64_MAX}) {
    Call call;
    call.q = call.floats({2, 5, 4, 1}), call.k = call.floats({2, 7, 2, 1}), call.v = call.floats({2, 7, 2, 1});
    call.d_o = call.floats({2, 5, 4, 1});
    call.o = TensorView(call.written.data(), DType::f32, {2, 5, 4, 1});
    call.gradients.dq = TensorView(call.written.data() + 300, DType::f32, {2, 5, 4, 1});
    call.gradients.dk = TensorView(call.written.data() + 400, DType::f32, {2, 7, 2, 1});
    call.gradients.dv = TensorView(call.written.data() + 500, DType::f32, {2, 7, 2, 1});
    for (TensorView* view :
         {&call.q, &call.k, &call.v, &call.d_o, &call.o, &call.gradients.dq, &call.gradients.dk, &call.gradients.dv}) {
      view->stride[3] = stride;
    }
    call.options.seqused_q = call.indices({3, 5});
    call.forward();
    Runtime runtime;
    runtime.workspace = call.buffer.get(1 << 24);
    const TensorView o = call.d_o;  // which need not be what the forward gave
    attention_backward(call.q, call.k, call.v, o, call.floats({2, 4, 5}), call.d_o, {}, call.gradients, call.options,
                       runtime);
    if (plain.empty()) {
      plain = call.written;
      EXPECT_FALSE(call.untouched());
    }
    EXPECT_EQ(call.written, plain);
  }
}

// k and v without keys may have no address, from which no head is counted.
TEST(Arguments, GradientsOfABiasWithoutKeys) {
  Call call;
  call.k = TensorView(nullptr, DType::f32, {2, 0, 2, 8}), call.v = TensorView(nullptr, DType::f32, {2, 0, 2, 6});
  call.options.bias = call.floats({2, 4, 5, 1});
  call.gradients.dk = call.gradients.dv = {};
  call.gradients.dbias = TensorView(call.written.data() + 1200, DType::f32, {2, 4, 5, 1});
  call.backward();
  for (int i = 0; i < 2 * 4 * 5; ++i) EXPECT_EQ(call.written[1200 + i], 0.0f);
}

TEST(Arguments, WorkspaceTooSmallOrMisalignedIsRefused) {
  Call call;
  call.options.force = "cpu_baseline";
  const std::size_t needed = attention_forward_workspace(call.q, call.k, call.v, call.options);
  ASSERT_GT(needed, 0u);
  Runtime runtime;
  runtime.workspace = {call.buffer.get(needed + 64).data, needed - 1};
  EXPECT_THROW(attention_forward(call.q, call.k, call.v, call.o, call.lse, call.options, runtime), Error);
  runtime.workspace = {static_cast<char*>(runtime.workspace.data) + 4, needed};
  EXPECT_THROW(attention_forward(call.q, call.k, call.v, call.o, call.lse, call.options, runtime), Error);
  EXPECT_TRUE(call.untouched());
}

TEST(Arguments, ExplainNamesEveryCandidateAndOneChoice) {
  Call call;
  for (Pass pass : {Pass::forward, Pass::backward}) {
    const std::vector<Candidate> list = pass == Pass::forward
                                            ? explain_attention(call.q, call.k, call.v, call.options)
                                            : explain_attention_backward(call.q, call.k, call.v, {}, call.options);
    EXPECT_EQ(std::count_if(list.begin(), list.end(), [](const Candidate& c) { return c.chosen; }), 1);
    for (const Candidate& candidate : list) {
      EXPECT_NE(candidate.chosen, !candidate.reason.empty()) << candidate.name;
      EXPECT_FALSE(candidate.chosen && candidate.method != "flash") << candidate.name;
    }
    AttentionOptions forced = call.options;
    forced.force = "reference";
    for (const Candidate& candidate : pass == Pass::forward
                                          ? explain_attention(call.q, call.k, call.v, forced)
                                          : explain_attention_backward(call.q, call.k, call.v, {}, forced)) {
      EXPECT_EQ(candidate.chosen, candidate.name == "reference");
    }
  }
}

}  // namespace
}  // namespace heddle
