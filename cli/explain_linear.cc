// heddle explain linear: a layer over packed weights, or its gradients.
#include <memory>

#include "explain.h"
#include "heddle/error.h"
#include "ops/linear/names.h"

namespace heddle::cli {
namespace {

struct ExplainLinear {
  Explained explained;
  std::int64_t rows = 1, outputs = 4096, inputs = 4096;
  std::string format = "nvfp4", order, dtype, activation = "none", norm = "none", pass = "forward", force;
  bool bias = false, residual = false, kept = false, int8_x = false, fp8_x = false, batch_invariant = false;

  bool gated() const { return activation_named(activation) == Activation::swiglu; }

  PackedWeights weights(StandIns& views, DType type) const {
    const Device device = explained.where();
    if (order == "dense") {
      PackedWeights dense = dense_weights(views.tensor(type, {outputs, inputs}), gated());
      return dense;
    }
    const lowbit::Format packed = lowbit::format_named(format);
    WeightOrder in = WeightOrder::rows16;
    if (!order.empty()) {
      in = weight_order_named(order);
    } else {
      const PackedOrder found = packed_order_for(packed, outputs, inputs, {device, gated(), int8_x, fp8_x});
      if (!found.refusal.empty()) throw Error("[explain] " + found.refusal);
      in = found.order;
    }
    PackedWeights w = packed_storage(packed, outputs, inputs, gated(), in);
    w.device = device;
    views.place(w.data);
    if (kept) w.kept = views.tensor(type, {outputs, inputs});
    return w;
  }

  void run() {
    require_at_least_one(rows, "--rows");
    require_at_least_one(outputs, "--outputs");
    require_at_least_one(inputs, "--inputs");
    const GpuModel* const gpu = explained.begin();
    StandIns views(explained.where());
    const DType type = dtype_named(dtype_or_default(dtype, explained.where()));
    const PackedWeights w = weights(views, type);
    LinearOptions options;
    options.activation = activation_named(activation);
    options.norm = norm_named(norm);
    options.int8_x = int8_x;
    options.batch_invariant = batch_invariant;
    options.force = force;
    const std::int64_t columns = gated() ? outputs / 2 : outputs;
    if (bias) options.bias = views.tensor(type, {outputs});
    if (residual) options.residual = views.tensor(type, {rows, columns});
    if (options.norm != Norm::none) options.norm_weight = views.tensor(type, {inputs});
    const TensorView x = views.tensor(type, {rows, inputs});
    const auto candidates = [&] {
      if (pass == "forward") {
        return gpu != nullptr ? explain_linear_on(*gpu, x, w, options) : explain_linear(x, w, options);
      }
      LinearGradients gradients;
      gradients.dx = views.tensor(type, {rows, inputs});
      if (bias) gradients.dbias = views.tensor(type, {outputs});
      if (options.norm != Norm::none) gradients.dnorm_weight = views.tensor(type, {inputs});
      const TensorView dy = views.tensor(type, {rows, columns});
      return gpu != nullptr ? explain_linear_backward_on(*gpu, dy, x, w, gradients, options)
                            : explain_linear_backward(dy, x, w, gradients, options);
    }();
    explained.tell("x " + x.shape_text() + " " + name_of(type) + ", W [" + std::to_string(outputs) + ", " +
                       std::to_string(inputs) + "] " + (order == "dense" ? "" : format + " ") + "in order " +
                       name_of(w.order) + ", " + pass,
                   call(w, type), candidates);
  }

  Json call(const PackedWeights& w, DType type) const {
    Json problem = {{"rows", rows}, {"outputs", outputs}, {"inputs", inputs}};
    if (w.order != WeightOrder::dense) problem["format"] = format;
    problem["order"] = name_of(w.order);
    problem["dtype"] = name_of(type);
    if (activation != "none") problem["activation"] = activation;
    if (norm != "none") problem["norm"] = norm;
    for (const auto& [given, word] : {std::pair{bias, "bias"},
                                      {residual, "residual"},
                                      {kept, "kept_16bit"},
                                      {int8_x, "int8_x"},
                                      {batch_invariant, "batch_invariant"}}) {
      if (given) problem[word] = true;
    }
    if (explained.device != "cpu") problem["device"] = explained.device;
    return {{"problem", problem}, {"pass", pass}};
  }
};

}  // namespace

void add_explain_linear(CLI::App& explain) {
  CLI::App* verb = explain.add_subcommand("linear", "A linear layer over packed weights, or its gradients");
  examples(*verb, {"heddle explain linear --rows 16 --outputs 14336 --format mxfp4 --gpu h100",
                   "heddle explain linear --rows 512 --norm rms_norm --activation swiglu --bias --pass backward"});
  const auto self = std::make_shared<ExplainLinear>();
  self->explained.add_to(*verb);
  verb->add_option("--rows", self->rows, "Rows of x, M")->capture_default_str();
  verb->add_option("--outputs", self->outputs, "Rows of W, N")->capture_default_str();
  verb->add_option("--inputs", self->inputs, "Columns of W, K")->capture_default_str();
  add_format_flag(*verb, self->format, "The weights' format");
  add_order_flag(
      *verb, self->order,
      "Of packed weights; dense: W in 16 bits, not quantised (default: as weights are packed for the device)");
  add_dtype_flag(*verb, self->dtype, "Of x and y (default: f32, on a GPU bf16)");
  one_of(verb->add_option("--activation", self->activation, "Of y"), activation_names())->capture_default_str();
  one_of(verb->add_option("--norm", self->norm, "Of each row of x"), norm_names())->capture_default_str();
  verb->add_flag("--bias", self->bias, "With a bias [N]");
  verb->add_flag("--residual", self->residual, "With a residual, added to y");
  verb->add_flag("--keep-16bit", self->kept, "On a GPU, with W in 16 bits beside");
  verb->add_flag("--int8-x", self->int8_x, "x is rounded to 8 bits");
  verb->add_flag("--fp8-x", self->fp8_x, "On a GPU, weights are packed for x in e4m3");
  verb->add_flag("--batch-invariant", self->batch_invariant, "A row's bits do not depend on the other rows");
  add_force_flag(*verb, self->force);
  add_pass_flag(*verb, self->pass);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
