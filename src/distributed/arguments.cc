#include "distributed/arguments.h"

#include <bit>
#include <cmath>
#include <tuple>

namespace heddle::distributed {
namespace {

// Whether a rank's rows, or the keys that it meets, stand for several positions each.
bool rows_stand_apart(const Plan& plan, Scheme scheme) {
  return plan.problem().order == Order::striped && plan.ulysses(scheme) < plan.problem().ranks;
}

// Keys that a row of the area attends at most; -1: any number.
std::int64_t width_of(const Area& area) {
  const std::int64_t right = area.causal == Causal::none ? area.window_right : 0;
  return area.window_left < 0 || right < 0 ? -1 : area.window_left + right + 1;
}

void check_bias(const Check& check, const Plan& plan, Scheme scheme, const TensorView& q, const TensorView& bias) {
  const std::int64_t B = q.shape[0], rows = q.shape[1], H = q.shape[2], S = plan.problem().rows;
  check.tensor(bias, "bias", bias.dtype, q.device, 4);
  check.require(bias.dtype == DType::f32 || bias.dtype == q.dtype, "bias is ", name_of(bias.dtype),
                ": it must be float32 or have q's dtype, ", name_of(q.dtype));
  const auto& shape = bias.shape;
  check.require(
      (shape[0] == 1 || shape[0] == B) && (shape[1] == 1 || shape[1] == H) && shape[2] == rows && shape[3] == S,
      "bias is ", bias, ": it must be [B or 1, H or 1, rows, S], [", B, " or 1, ", H, " or 1, ", rows, ", ", S, "]");
  check.require(!heads_move(scheme), "bias is given and the scheme is ", name_of(scheme),
                ": it must be gather, ring or needed");
  const std::vector<Area>& areas = plan.areas();
  const bool one = areas.size() <= 1 && (areas.empty() || (areas[0].q_begin == 0 && areas[0].q_end == S &&
                                                           areas[0].key_begin == 0 && areas[0].key_end == S));
  check.require(one && plan.problem().order != Order::striped,
                "bias is given: the plan must have one document, in runs of rows");
}

}  // namespace

Call checked_call(const char* operation, const Plan& plan, Scheme scheme, const Communicator& communicator,
                  const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                  const TensorView& lse, const Options& options, const Runtime& runtime) {
  const Check check(operation);
  const Device device = communicator.device();
  const int rank = communicator.rank();
  check.require(!q.given() || q.device == device, "q is ", q.device == Device::cpu ? "on the CPU" : "on a GPU",
                ": tensors must lie where messages by ", communicator.name(), " do, ",
                device == Device::cpu ? "on the CPU" : "on a GPU");
  check.tensor(q, "q", q.dtype, device, 4);
  check.require(q.dtype == DType::f32 || q.dtype == DType::f16 || q.dtype == DType::bf16, "q is ", name_of(q.dtype),
                ": it must be float32, float16 or bfloat16");
  check.tensor(k, "k", q.dtype, device, 4);
  check.tensor(v, "v", q.dtype, device, 4);
  check.tensor(o, "o", o.dtype, device, 4);
  check.require(o.dtype == DType::f32 || o.dtype == q.dtype, "o is ", name_of(o.dtype),
                ": it must be float32 or have q's dtype, ", name_of(q.dtype));
  const std::int64_t rows = plan.rows(rank);
  for (const auto& [name, x] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}}) {
    check.require(x->shape[1] == rows, name, " is ", *x, ": rank ", rank, " of the plan has ", rows, " rows");
  }
  const bool fits = k.shape[0] == q.shape[0] && v.shape[0] == q.shape[0] && k.shape[3] == q.shape[3] &&
                    k.shape[2] == v.shape[2] && k.shape[2] > 0 && q.shape[2] % k.shape[2] == 0;
  check.require(fits, "q is ", q, ", k ", k, " and v ", v,
                ": they must be [B, rows, H, D], [B, rows, Hkv, D] and [B, rows, Hkv, Dv] with H a multiple of Hkv");
  for (const auto& [name, size] : {std::pair{"q", q.shape[3]}, {"v", v.shape[3]}}) {
    check.require(size >= 1 && size <= 256, name, " has head size ", size, ": it must be from 1 to 256");
  }
  check.require(o.shape[0] == q.shape[0] && o.shape[1] == rows && o.shape[2] == q.shape[2] && o.shape[3] == v.shape[3],
                "o is ", o, ": it must be [B, rows, H, Dv] of q ", q, " and v ", v);
  check.not_overlapping(o, "o");
  if (lse.given()) {
    check.tensor(lse, "lse", DType::f32, device, 3);
    check.require(lse.shape[0] == q.shape[0] && lse.shape[1] == q.shape[2] && lse.shape[2] == rows, "lse is ", lse,
                  ": it must be [B, H, rows] of q, ", q);
  }
  for (const auto& [name, x] : {std::pair{"alibi_slopes", &options.alibi_slopes}, {"sink", &options.sink}}) {
    if (!x->given()) continue;
    check.tensor(*x, name, DType::f32, device, 1);
    check.require(x->shape[0] == q.shape[2], name, " is ", *x, ": it must be [H], ", q.shape[2]);
  }
  if (options.bias.given()) check_bias(check, plan, scheme, q, options.bias);
  check.require(!options.alibi_slopes.given() || !rows_stand_apart(plan, scheme),
                "alibi_slopes are given and the plan's order is striped: its rows stand for several positions each, "
                "which ALiBi is not about");
  return {q, k, v, o, lse, options, runtime, {q.shape[0], k.shape[2], q.shape[3], v.shape[3], q.dtype, device}};
}

void check_backward(const Call& call, const Plan& plan, Scheme scheme, const TensorView& d_o, const TensorView& d_lse,
                    const Gradients& gradients) {
  const auto& [q, k, v, o, lse, options, runtime, keys] = call;
  const Check check(kBackward);
  check.require(lse.given(), "lse is missing: a backward needs forward's");
  check.require(!gradients.dsink.given() || options.sink.given(), "dsink is given and sink is not");
  if (keys.device == Device::cuda) {
    for (const Area& area : plan.areas()) {
      const std::int64_t width = width_of(area), step = plan.problem().ranks;
      check.require(!rows_stand_apart(plan, scheme) || width < 0 || width >= step, "the plan's order is striped, its ",
                    "rows stand ", step, " positions apart and a window has ", width,
                    ": gradients on a GPU take one that is no narrower");
    }
  }
  for (const auto& [name, gradient, x] :
       {std::tuple{"dq", &gradients.dq, &q}, {"dk", &gradients.dk, &k}, {"dv", &gradients.dv, &v}}) {
    if (!gradient->given()) continue;
    check.tensor(*gradient, name, gradient->dtype, keys.device, 4);
    check.require(gradient->dtype == DType::f32 || gradient->dtype == q.dtype, name, " is ", name_of(gradient->dtype),
                  ": it must be float32 or have q's dtype, ", name_of(q.dtype));
    check.require(gradient->shape == x->shape, name, " is ", *gradient, ": it must have its tensor's shape, ", *x);
    check.not_overlapping(*gradient, name);
  }
  check.tensor(d_o, "d_o", o.dtype, keys.device, 4);
  check.require(d_o.shape == o.shape, "d_o is ", d_o, ": it must have o's shape, ", o);
  if (d_lse.given()) {
    check.tensor(d_lse, "d_lse", DType::f32, keys.device, 3);
    check.require(d_lse.shape == lse.shape, "d_lse is ", d_lse, ": it must have lse's shape, ", lse);
  }
  if (gradients.dbias.given()) {
    check.require(keys.device == Device::cpu, "dbias is given: pieces on a GPU have no gradient of a bias");
    check.require(options.bias.given() && options.bias.dtype == DType::f32,
                  "dbias is given: bias must be, too, in float32");
    check.tensor(gradients.dbias, "dbias", DType::f32, keys.device, 4);
    check.require(gradients.dbias.shape == options.bias.shape && gradients.dbias.contiguous(), "dbias is ",
                  gradients.dbias, ": it must have bias's shape, ", options.bias, ", and be contiguous");
  }
  if (gradients.dsink.given()) {
    check.tensor(gradients.dsink, "dsink", DType::f32, keys.device, 1);
    check.require(gradients.dsink.shape[0] == q.shape[2] && gradients.dsink.contiguous(), "dsink is ", gradients.dsink,
                  ": it must be [H], contiguous, ", q.shape[2]);
  }
}

std::vector<Agreement::Word> words_of(const Call& call, const Plan& plan, Scheme scheme, Scheme across,
                                      const Gradients* gradients) {
  const auto bits = [](float x) { return std::bit_cast<std::int32_t>(x); };
  const Options& options = call.options;
  const float scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(call.keys.head_size)));
  const Gradients none = {}, &g = gradients != nullptr ? *gradients : none;
  // Where heads move, o and dq do in the dtypes that they have.
  const auto moved_dtype = [&](const TensorView& x) {
    return heads_move(scheme) && x.given() ? static_cast<std::int64_t>(x.dtype) : -1;
  };
  return {{"plan", static_cast<std::int64_t>(plan.digest()), Agreement::Shown::digest},
          {"scheme", static_cast<std::int64_t>(scheme)},
          {"ulysses", plan.ulysses(scheme)},
          {"scheme across groups", static_cast<std::int64_t>(across)},
          {"batch", call.batch()},
          {"heads", call.heads()},
          {"kv_heads", call.keys.heads},
          {"head_size", call.keys.head_size},
          {"head_size_v", call.keys.head_size_v},
          {"dtype", static_cast<std::int64_t>(call.keys.dtype)},
          {"scale", bits(scale), Agreement::Shown::f32},
          {"softcap", bits(options.softcap), Agreement::Shown::f32},
          {"alibi_slopes", options.alibi_slopes.given()},
          {"sink", options.sink.given()},
          {"bias", options.bias.given()},
          {"chunked", options.chunked},
          {"backward", gradients != nullptr},
          {"dtype of o", moved_dtype(call.o)},
          {"dq", g.dq.given()},
          {"dtype of dq", moved_dtype(g.dq)},
          {"dk and dv", g.dk.given() || g.dv.given()},
          {"dsink", g.dsink.given()}};
}

}  // namespace heddle::distributed
