#include "operations.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "cuda/backend.h"
#include "heddle/adaptive.h"
#include "heddle/int4_cache.h"
#include "heddle/kv_cache.h"
#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "heddle/nsa.h"
#include "heddle/partial.h"
#include "heddle/sparse.h"
#include "ops/nsa/nsa.h"
#include "problem.h"
#include "tensors.h"

namespace heddle::cli {
namespace {

constexpr std::int64_t kSize = 1024;  // of linear layers: N and K

using Names = std::initializer_list<std::string_view>;

// Adds what candidates of `device` say of one call to what they said of those before: one that took a call runs here.
// Of the others the first call's reason stands, but that of the call which is for `own` candidates for those.
void add(Operation& operation, Device device, const std::vector<Candidate>& asked, Names own = {}) {
  for (const Candidate& c : asked) {
    if (c.device != device) continue;
    auto known = std::ranges::find(operation.candidates, c.name, &CandidateFact::name);
    const std::string refusal = c.supported ? "" : c.reason;  // a supported one may wait to be asked for by name
    if (known == operation.candidates.end()) {
      operation.candidates.push_back({c.name, c.method, device == Device::cuda ? "cuda" : "cpu", refusal});
    } else if (!known->refusal.empty() && (c.supported || std::ranges::find(own, c.name) != own.end())) {
      known->refusal = refusal;
    }
  }
}

// Rows into caches, and weights into a format and back.
std::vector<Operation> caches_and_weights() {
  Operation rotary{"apply_rotary", {}}, append{"append_kv_cache", {}}, int4{"append_int4_cache", {}},
      quantize{"quantize", {}}, dequantize{"dequantize", {}}, unpack{"unpack_weights", {}};
  for (const Device device : {Device::cpu, Device::cuda}) {
    constexpr std::int64_t kHeads = 2, kD = 64, kSlots = 128;
    StandIns views(device);
    const auto rows = [&](std::int64_t count) { return views.tensor(DType::bf16, {1, count, kHeads, kD}); };
    const TensorView k = rows(1), v = rows(1), seqlens = views.indices({0}, {1});
    const TensorView table = views.tensor(DType::f32, {kSlots, kD / 2});
    add(rotary, device, explain_apply_rotary(k, k, {.cos = table, .sin = table}));
    add(append, device, explain_append_kv_cache(k, v, rows(kSlots), rows(kSlots), seqlens));
    Int4Cache cache;
    cache.blocks = views.tensor(DType::u8, {1, 1, kHeads, int4_cache_block_bytes(kD, kD)});
    cache.k_tail = rows(kSlots);
    cache.v_tail = rows(kSlots);
    add(int4, device, explain_append_int4_cache(k, v, cache, seqlens));

    LinearSample s(device, "nvfp4", device == Device::cuda ? WeightOrder::fragments16 : WeightOrder::rows16, kSize);
    const TensorView plain = s.views.tensor(DType::bf16, {kSize, kSize});
    lowbit::QuantizedMatrix matrix = lowbit::storage(s.weights.format, kSize, kSize);
    for (TensorView* part : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) s.views.place(*part);
    add(quantize, device, lowbit::explain_quantize(plain, {}, matrix));
    add(dequantize, device, lowbit::explain_dequantize(matrix, plain));
    add(unpack, device, explain_unpack_weights(s.weights, plain));
  }
  return {rotary, append, int4, quantize, dequantize, unpack};
}

// Attention over lists of key blocks, and its gradients.
std::vector<Operation> over_lists() {
  Operation forward{"sparse_attention_forward", {}}, backward{"sparse_attention_backward", {}};
  for (const Device device : {Device::cpu, Device::cuda}) {
    StandIns views(device);
    const TensorView x = views.tensor(DType::f32, {1, 64, 2, 64});
    BlockLists lists;
    lists.blocks = views.indices(std::vector<std::int32_t>(64), {1, 64, 1, 1});
    add(forward, device, explain_sparse_attention(x, x, x, lists, {}));
    add(backward, device, explain_sparse_attention_backward(x, x, x, lists, {}, {}));
  }
  return {forward, backward};
}

// Attention with a tolerance, and its gradients: on the CPU alone.
std::vector<Operation> with_a_tolerance() {
  Operation forward{"adaptive_attention_forward", {}}, backward{"adaptive_attention_backward", {}};
  StandIns views(Device::cpu);
  const TensorView x = views.tensor(DType::f32, {1, 64, 2, 64});
  add(forward, Device::cpu, explain_adaptive_attention(x, x, x, {}, {}));
  add(backward, Device::cpu, explain_adaptive_attention_backward(x, x, x, {}, {}, {}));
  return {forward, backward};
}

// Keys pooled, blocks chosen by their scores, branches joined by gates, and a step of decoding in one launch.
std::vector<Operation> native_sparse_attention() {
  Operation pool{"pool_keys", {}}, backward{"pool_keys_backward", {}}, select{"select_blocks", {}},
      gate{"gate_branches", {}}, gate_backward{"gate_branches_backward", {}}, step{"nsa_step", {}};
  for (const Device device : {Device::cpu, Device::cuda}) {
    StandIns views(device);
    const TensorView x = views.tensor(DType::f32, {1, 64, 2, 64}), pooled = views.tensor(DType::f32, {1, 1, 2, 64});
    const TensorView blocks = views.tensor(DType::i32, {1, 64, 2, 16});
    add(pool, device, explain_pool_keys(x, pooled, {}));
    add(backward, device, explain_pool_keys_backward(pooled, x, {}));
    add(select, device, explain_select_blocks(x, pooled, {}, blocks, {}));
    const std::vector<GatedBranch> branches(3, GatedBranch{x, views.tensor(DType::f32, {1, 64, 2})});
    add(gate, device, explain_gate_branches(branches, x));
    add(gate_backward, device, explain_gate_branches_backward(branches, x, branches));
    const auto rows = [&](std::int64_t count, std::int64_t heads) {
      return views.tensor(DType::bf16, {1, count, heads, 128});
    };
    const NsaCache cache{.k = rows(64, 1),
                         .v = rows(64, 1),
                         .k_pooled = rows(1, 1),
                         .v_pooled = rows(1, 1),
                         .lengths = views.tensor(DType::i32, {1})};
    const TensorView of_step = rows(1, 4), by_head = views.tensor(DType::f32, {1, 1, 4});
    add(step, device,
        explain_nsa_step(of_step, rows(1, 1), rows(1, 1), cache, {.cmp = by_head, .slc = by_head, .swa = {}},
                         rows(1, 4), {}));
  }
  return {pool, backward, select, gate, gate_backward, step};
}

// Partial results joined, and the gradients of that.
std::vector<Operation> merges() {
  Operation merge{"merge_attention", {}}, backward{"merge_attention_backward", {}};
  for (const Device device : {Device::cpu, Device::cuda}) {
    StandIns views(device);
    const TensorView o = views.tensor(DType::f32, {1, 2, 2, 64}), lse = views.tensor(DType::f32, {1, 2, 2});
    const std::vector<Partial> partials(2, Partial{o, lse});
    add(merge, device, explain_merge_attention(partials, o, lse));
    add(backward, device, explain_merge_attention_backward(partials, o, lse, partials, {}));
  }
  return {merge, backward};
}

}  // namespace

LinearSample::LinearSample(Device device, const char* format, WeightOrder order, std::int64_t size)
    : views(device),
      x(views.tensor(DType::bf16, {1, size})),
      dx(views.tensor(DType::bf16, {1, size})),
      weights(packed_storage(lowbit::format_named(format), size, size, false, order)) {
  views.place(weights.data);
  weights.device = device;
}

std::vector<Operation> operations() {
  Operation forward{"attention_forward", {}}, backward{"attention_backward", {}}, linear{"linear_forward", {}},
      linear_backward{"linear_backward", {}};
  ProblemFlags sample;
  for (const Device device : {Device::cpu, Device::cuda}) {
    sample.device = device == Device::cuda ? "cuda" : "cpu";
    sample.dtype = device == Device::cuda ? "bf16" : "f32";
    const ProblemTensors t(sample, ProblemTensors::Memory::none);
    add(forward, device, explain_attention(t.q, t.k, t.v, t.options));
    add(backward, device, explain_attention_backward(t.q, t.k, t.v, {}, t.options));
  }
  const auto ask = [&](const ProblemFlags& flags, DType dtype, Precision precision, Names own) {
    ProblemTensors t(flags, ProblemTensors::Memory::none);
    t.q.dtype = t.k.dtype = t.v.dtype = dtype;
    t.options.precision = precision;
    add(forward, Device::cuda, explain_attention(t.q, t.k, t.v, t.options), own);
  };
  ask(sample, DType::f8e4m3, Precision::f32, {"sm90_fp8"});
  ask(sample, DType::bf16, Precision::int8_qk, {"sm80_int8"});
  sample.length_q = 1;
  ask(sample, DType::bf16, Precision::f32, {"sm90_decode", "sm80_decode"});

  const struct {
    Device device;
    const char* format;
    WeightOrder order;
    std::string_view own;
  } kLayers[] = {{Device::cpu, "int4_g64", WeightOrder::rows16, ""},
                 {Device::cuda, "nvfp4", WeightOrder::fragments16, ""},
                 {Device::cuda, "mxfp4", WeightOrder::fragments8, "sm90_w4a8"},
                 {Device::cuda, "int4_g64", WeightOrder::matrix, "cublaslt"},
                 {Device::cuda, "fp8_row", WeightOrder::matrix8, "cublaslt_w8a8"}};
  for (const auto& layer : kLayers) {
    const LinearSample s(layer.device, layer.format, layer.order, kSize);
    add(linear, layer.device, explain_linear(s.x, s.weights), {layer.own});
    LinearGradients gradients;
    gradients.dx = s.dx;
    add(linear_backward, layer.device, explain_linear_backward(s.x, {}, s.weights, gradients), {layer.own});
  }
  std::vector<Operation> all = {forward, backward};
  for (Operation& operation : over_lists()) all.push_back(std::move(operation));
  for (Operation& operation : with_a_tolerance()) all.push_back(std::move(operation));
  for (Operation& operation : native_sparse_attention()) all.push_back(std::move(operation));
  for (Operation& operation : merges()) all.push_back(std::move(operation));
  all.insert(all.end(), {linear, linear_backward});
  for (Operation& operation : caches_and_weights()) all.push_back(std::move(operation));
  return all;
}

}  // namespace heddle::cli
