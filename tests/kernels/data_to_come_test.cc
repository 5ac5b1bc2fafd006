// Questions about a call whose tensors are not there yet: what they answer, and what is refused.
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "core/check.h"
#include "cuda/backend.h"
#include "heddle/attention.h"
#include "heddle/error.h"
#include "heddle/explain.h"
#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "kit/case_data.h"
#include "kit/messages.h"

namespace heddle {
namespace {

// The view as it is known before its data: where that will be at a multiple of is all that is said of its address.
TensorView to_come(TensorView view) {
  if (view.data == nullptr) return view;
  view.alignment = alignment_of(view);
  view.data = nullptr;
  return view;
}

AttentionGradients to_come(const AttentionGradients& g) {
  return {to_come(g.dq), to_come(g.dk), to_come(g.dv), to_come(g.dbias), to_come(g.dsink)};
}

AttentionOptions to_come(AttentionOptions o) {
  for (TensorView* view :
       {&o.alibi_slopes, &o.bias, &o.mask, &o.sink, &o.draft_mask, &o.q_scale, &o.k_scale, &o.v_scale}) {
    *view = to_come(*view);
  }
  return o;
}
// On a GPU the host does not read index data either.
AttentionOptions indices_to_come(AttentionOptions o) {
  o = to_come(o);
  for (TensorView* view : {&o.cu_seqlens_q, &o.cu_seqlens_k, &o.seqused_q, &o.seqused_k, &o.page_table,
                           &o.cache_batch_idx, &o.cache_leftpad}) {
    *view = to_come(*view);
  }
  return o;
}

std::string text_of(const std::vector<Candidate>& list) {
  std::string all;
  for (const Candidate& c : list) {
    all += text(c.name, c.chosen ? ", chosen: " : ": ", c.reason, "; ", c.seconds, " s, ", c.workspace, " bytes, ",
                c.plan, "\n");
  }
  return all;
}

std::vector<Candidate> explained(const TensorView& q, const TensorView& k, const TensorView& v,
                                 const AttentionOptions& options, Pass pass, const AttentionGradients& gradients) {
  return pass == Pass::forward ? explain_attention(q, k, v, options)
                               : explain_attention_backward(q, k, v, gradients, options);
}
std::vector<Candidate> explained_on(const GpuModel& gpu, const TensorView& q, const TensorView& k, const TensorView& v,
                                    const AttentionOptions& options, Pass pass, const AttentionGradients& gradients) {
  return pass == Pass::forward ? explain_attention_on(gpu, q, k, v, options)
                               : explain_attention_backward_on(gpu, q, k, v, gradients, options);
}

// The bytes of workspace, or what the query says in refusing.
std::string workspace_of(const TensorView& q, const TensorView& k, const TensorView& v, const AttentionOptions& options,
                         Pass pass, const AttentionGradients& gradients) {
  try {
    return text(pass == Pass::forward ? attention_forward_workspace(q, k, v, options)
                                      : attention_backward_workspace(q, k, v, gradients, options));
  } catch (const Error& error) {
    return error.what();
  }
}

void expect_the_same_answers(const kit::AttentionCase& spec) {
  const kit::CaseData data(spec);
  const TensorView q = data.q.view(), k = data.k.view(), v = data.v.view();
  AttentionOptions options = data.options();
  options.max_seqlen_q = data.spec.Sq, options.max_seqlen_k = data.spec.Sk;  // which a GPU needs
  const kit::Gradients gradients = data.new_gradients();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !data.d_o.given()) continue;
    EXPECT_EQ(
        text_of(explained(to_come(q), to_come(k), to_come(v), to_come(options), pass, to_come(gradients.views()))),
        text_of(explained(q, k, v, options, pass, gradients.views())));
    EXPECT_EQ(workspace_of(to_come(q), to_come(k), to_come(v), to_come(options), pass, to_come(gradients.views())),
              workspace_of(q, k, v, options, pass, gradients.views()));
    for (const char* name : {"a100", "h100"}) {
      const GpuModel& gpu = gpu_model_named(name);
      EXPECT_EQ(text_of(explained_on(gpu, to_come(q), to_come(k), to_come(v), indices_to_come(options), pass,
                                     to_come(gradients.views()))),
                text_of(explained_on(gpu, q, k, v, options, pass, gradients.views())))
          << name;
    }
  }
}

// One test: a process for each case takes eight times as long.
TEST(DataToCome, ChangesNoAnswer) {
  for (const kit::AttentionCase& spec : kit::attention_cases()) {
    SCOPED_TRACE(spec.name);
    expect_the_same_answers(spec);
  }
}

TensorView view(DType dtype, std::initializer_list<std::int64_t> shape, int alignment = 16) {
  TensorView x(nullptr, dtype, shape);
  x.device = Device::cuda;
  x.alignment = alignment;
  return x;
}

std::string reason_on_h100(const std::string& candidate, const TensorView& q, const TensorView& k) {
  for (const Candidate& c : explain_attention_on(gpu_model_named("h100"), q, k, k, {})) {
    if (c.name == candidate) return c.reason;
  }
  return "no such candidate";
}

TEST(DataToCome, IsAlignedAsTheViewSays) {
  if (!cuda::built()) GTEST_SKIP() << "built without CUDA";
  const TensorView q = view(DType::bf16, {2, 64, 8, 128}), k = view(DType::bf16, {2, 64, 2, 128});
  EXPECT_EQ(reason_on_h100("sm90", q, k), "");
  EXPECT_EQ(reason_on_h100("sm90", q, view(DType::bf16, {2, 64, 2, 128}, 8)),
            "k's rows must be contiguous, with address and strides in multiples of 16 bytes");
  EXPECT_EQ(reason_on_h100("sm80", q, view(DType::bf16, {2, 64, 2, 128}, 2)), "");
}

TEST(DataToCome, MayBeThatOfLinearLayers) {
  if (!cuda::built()) GTEST_SKIP() << "built without CUDA";
  const PackedWeights weights =
      packed_storage(lowbit::format_named("nvfp4"), 256, 512, /*gated=*/false, WeightOrder::fragments16);
  LinearOptions options;
  options.norm = Norm::rms_norm;
  const auto reason = [&](const TensorView& x, const TensorView& norm_weight) {
    options.norm_weight = norm_weight;
    for (const Candidate& c : explain_linear_on(gpu_model_named("h100"), x, weights, options)) {
      if (c.name == "sm90_w4a16") return c.reason;
    }
    return std::string("no such candidate");
  };
  EXPECT_EQ(reason(view(DType::bf16, {64, 512}), view(DType::bf16, {512})), "");
  EXPECT_EQ(reason(view(DType::bf16, {64, 512}), view(DType::bf16, {512}, 8)),
            "the norm's parameters must be aligned to 16 bytes");
  EXPECT_EQ(reason(view(DType::bf16, {64, 512}, 4), view(DType::bf16, {512})),
            "x's rows must begin at multiples of 16 bytes; found a stride of 512 elements, and a first byte at a "
            "multiple of 4");
}

TEST(DataToCome, MayBeThatOfAQuantisation) {
  const TensorView weights(nullptr, DType::bf16, {64, 128});
  const lowbit::QuantizedMatrix out = lowbit::storage(lowbit::format_named("nvfp4"), 64, 128);
  lowbit::QuantizeOptions options;
  options.rule = lowbit::ScaleRule::mse;
  options.importance = TensorView(nullptr, DType::f32, {128});
  EXPECT_EQ(lowbit::quantize_workspace(weights, options, out), 0);
  for (const Candidate& c : lowbit::explain_quantize(weights, options, out)) EXPECT_EQ(c.chosen, c.name == "cpu");
}

TEST(DataToCome, IsNoneForACall) {
  const TensorView q(nullptr, DType::f32, {1, 4, 2, 8});
  std::vector<float> written(64);
  const TensorView o(written.data(), DType::f32, {1, 4, 2, 8});
  kit::expect_message([&] { attention_forward(q, q, q, o, {}, {}, {}); },
                      "[attention_forward] q has no data: its pointer is null; found q [1, 4, 2, 8]");
}

TEST(DataToCome, IsNotIndexDataOnTheCpu) {
  const TensorView q(nullptr, DType::f32, {4, 2, 8});
  AttentionOptions options;
  options.cu_seqlens_q = options.cu_seqlens_k = TensorView(nullptr, DType::i32, {3});
  kit::expect_message([&] { attention_forward_workspace(q, q, q, options); },
                      "[attention_forward] cu_seqlens_q has no data: index data on the CPU is read in questions too");
}

TEST(DataToCome, HasAPowerOfTwoAsItsAlignment) {
  TensorView q(nullptr, DType::f32, {1, 4, 2, 8});
  q.alignment = 12;
  kit::expect_message([&] { attention_forward_workspace(q, q, q, {}); },
                      "[attention_forward] q has no data yet and alignment 12: it must be a power of two");
}

}  // namespace
}  // namespace heddle
