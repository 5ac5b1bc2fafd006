// heddle explain quantize, dequantize, unpack: a matrix of weights into a format, and back.
#include <memory>

#include "explain.h"
#include "heddle/error.h"

namespace heddle::cli {
namespace {

struct WeightMatrix {
  Explained explained;
  std::int64_t outputs = 4096, inputs = 4096;
  std::string format = "nvfp4", dtype, force;

  void add_to(CLI::App& verb) {
    explained.add_to(verb);
    verb.add_option("--outputs", outputs, "Rows, N")->capture_default_str();
    verb.add_option("--inputs", inputs, "Columns, K")->capture_default_str();
    add_format_flag(verb, format, "Of the quantised matrix");
    add_dtype_flag(verb, dtype, "Of plain weights (default: f32, on a GPU bf16)");
    add_force_flag(verb, force);
  }
  const GpuModel* begin() {
    require_at_least_one(outputs, "--outputs");
    require_at_least_one(inputs, "--inputs");
    return explained.begin();
  }
  TensorView plain(StandIns& views) const {
    return views.tensor(dtype_named(dtype_or_default(dtype, explained.where())), {outputs, inputs});
  }
  lowbit::QuantizedMatrix stored(StandIns& views) const {
    lowbit::QuantizedMatrix matrix = lowbit::storage(lowbit::format_named(format), outputs, inputs);
    for (TensorView* part : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) views.place(*part);
    return matrix;
  }
  Json json(const TensorView& weights) const {
    Json problem = {{"outputs", outputs}, {"inputs", inputs}, {"format", format}, {"dtype", name_of(weights.dtype)}};
    if (explained.device != "cpu") problem["device"] = explained.device;
    return problem;
  }
  static std::string line(const TensorView& weights) {
    return "W " + weights.shape_text() + " " + name_of(weights.dtype);
  }
};

struct ExplainQuantize : WeightMatrix {
  std::string rule = "plain";
  bool importance = false;

  void run() {
    const GpuModel* const gpu = begin();
    StandIns views(explained.where());
    const TensorView weights = plain(views);
    const lowbit::QuantizedMatrix out = stored(views);
    lowbit::QuantizeOptions options{.rule = lowbit::rule_named(rule), .force = force};
    const HostTensor ones(DType::f32, {inputs});  // importance is looked at on a CPU
    if (importance) {
      std::fill_n(reinterpret_cast<float*>(ones.data()), inputs, 1.0f);
      options.importance = explained.where() == Device::cpu ? ones.view() : views.tensor(DType::f32, {inputs});
    }
    Json problem = json(weights);
    problem["rule"] = rule;
    if (importance) problem["importance"] = true;
    explained.tell(line(weights) + " to " + format + " by rule " + rule, {{"problem", problem}},
                   gpu != nullptr ? lowbit::explain_quantize_on(*gpu, weights, options, out)
                                  : lowbit::explain_quantize(weights, options, out));
  }
};

struct ExplainDequantize : WeightMatrix {
  void run() {
    const GpuModel* const gpu = begin();
    StandIns views(explained.where());
    const TensorView weights = plain(views);
    const lowbit::QuantizedMatrix from = stored(views);
    const lowbit::DequantizeOptions options{.force = force};
    explained.tell(format + " to " + line(weights), {{"problem", json(weights)}},
                   gpu != nullptr ? lowbit::explain_dequantize_on(*gpu, from, weights, options)
                                  : lowbit::explain_dequantize(from, weights, options));
  }
};

struct ExplainUnpack : WeightMatrix {
  std::string order;

  void run() {
    const GpuModel* const gpu = begin();
    StandIns views(explained.where());
    const lowbit::Format packed = lowbit::format_named(format);
    const PackedOrder usual = packed_order_for(packed, outputs, inputs, {.device = explained.where()});
    if (order.empty() && !usual.refusal.empty()) throw Error("[explain] " + usual.refusal);
    PackedWeights from = packed_storage(packed, outputs, inputs, /*gated=*/false,
                                        order.empty() ? usual.order : weight_order_named(order));
    from.device = explained.where();
    views.place(from.data);
    const TensorView weights = plain(views);
    const UnpackOptions options{.force = force};
    Json problem = json(weights);
    problem["order"] = name_of(from.order);
    explained.tell(format + " in order " + name_of(from.order) + " to " + line(weights), {{"problem", problem}},
                   gpu != nullptr ? explain_unpack_weights_on(*gpu, from, weights, options)
                                  : explain_unpack_weights(from, weights, options));
  }
};

}  // namespace

void add_explain_lowbit(CLI::App& explain) {
  {
    CLI::App* verb = explain.add_subcommand("quantize", "A matrix of weights into 4 or 8 bits");
    examples(*verb, {"heddle explain quantize --outputs 14336 --rule mse --gpu h100",
                     "heddle explain quantize --format int4_g64 --rule mse --importance"});
    const auto self = std::make_shared<ExplainQuantize>();
    self->add_to(*verb);
    add_rule_flag(*verb, self->rule);
    verb->add_flag("--importance", self->importance, "With importances of columns [K]");
    verb->callback([self] { self->run(); });
  }
  {
    CLI::App* verb = explain.add_subcommand("dequantize", "A quantised matrix as plain weights");
    examples(*verb, {"heddle explain dequantize --format int4_g64", "heddle explain dequantize --gpu a100"});
    const auto self = std::make_shared<ExplainDequantize>();
    self->add_to(*verb);
    verb->callback([self] { self->run(); });
  }
  CLI::App* verb = explain.add_subcommand("unpack", "Packed weights as plain ones");
  examples(*verb, {"heddle explain unpack --format mxfp4 --dtype bf16",
                   "heddle explain unpack --format mxfp4 --order fragments8 --gpu h100"});
  const auto self = std::make_shared<ExplainUnpack>();
  self->add_to(*verb);
  add_order_flag(*verb, self->order, "Of the packed weights (default: as they are packed for the device)");
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
