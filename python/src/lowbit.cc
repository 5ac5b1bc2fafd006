#include "heddle/lowbit.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "checkpoint/quantize_rules.h"
#include "convert.h"
#include "heddle/checkpoint.h"
#include "heddle/error.h"
#include "heddle/explain.h"
#include "heddle/linear.h"

namespace heddle::python {
namespace {

using lowbit::QuantizedMatrix;

// Where views of nothing begin: a tensor of nobody's, aligned as an allocator's.
constexpr std::uintptr_t kFirstStandIn = 64;

// (shape, DType's number), or None.
nb::object describe(const TensorView& view) {
  if (!view.given()) return nb::none();
  nb::list shape;
  for (int i = 0; i < view.rank; ++i) shape.append(view.shape[i]);
  return nb::make_tuple(nb::tuple(shape), static_cast<int>(view.dtype));
}

// Of codes, scales, zeros and global_scale.
nb::tuple storage(const std::string& format, std::int64_t rows, std::int64_t columns) {
  const QuantizedMatrix m = lowbit::storage(lowbit::format_named(format), rows, columns);
  return nb::make_tuple(describe(m.codes), describe(m.scales), describe(m.zeros), describe(m.global_scale));
}

// numpy has no e4m3: its bits come as uint8.
TensorView as_stored(TensorView view, DType wanted) {
  if (view.dtype == DType::u8 && wanted == DType::f8e4m3) view.dtype = wanted;
  return view;
}

// A stored matrix as Python hands it over: format, rows, columns, codes, scales, zeros, global_scale.
QuantizedMatrix matrix_of(Arguments& arguments, const nb::tuple& parts, bool written) {
  if (parts.size() != 7) throw Error("[heddle] a quantised matrix must be a tuple of 7 items");
  const auto view = [&](int i, const char* name) {
    return written ? arguments.write(parts[i], name) : arguments.read(parts[i], name);
  };
  QuantizedMatrix m;
  std::string format;
  if (!nb::try_cast(parts[0], format)) throw Error("[lowbit] format is no string: it must be a format's name");
  if (!nb::try_cast(parts[1], m.rows) || !nb::try_cast(parts[2], m.columns)) {
    throw Error("[lowbit] shape is no pair of 64-bit integers: it must be (N, K)");
  }
  m.format = lowbit::format_named(format);
  const bool e4m3_codes = m.format.element == lowbit::Element::e4m3;
  const bool e4m3_scales = m.format.scale == lowbit::ScaleType::e4m3;
  m.codes = as_stored(view(3, "codes"), e4m3_codes ? DType::f8e4m3 : DType::u8);
  m.scales = as_stored(view(4, "scales"), e4m3_scales ? DType::f8e4m3 : DType::u8);
  m.zeros = view(5, "zeros");
  m.global_scale = view(6, "global_scale");
  return m;
}

void quantize(nb::handle weights, const nb::tuple& out, const std::string& rule, nb::handle importance,
              float global_scale, std::uintptr_t stream) {
  Arguments arguments("quantize", Arguments::Devices::any, stream);
  const TensorView from = arguments.read(weights, "weights");
  const QuantizedMatrix to = matrix_of(arguments, out, true);
  lowbit::QuantizeOptions options;
  options.rule = lowbit::rule_named(rule);
  options.importance = arguments.read(importance, "importance");
  options.global_scale = global_scale;
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  Runtime runtime = arguments.runtime();
  runtime.workspace = scratch.get(lowbit::quantize_workspace(from, options, to, runtime));
  lowbit::quantize(from, options, to, runtime);
}

void dequantize(nb::handle out, const nb::tuple& matrix, std::uintptr_t stream) {
  Arguments arguments("dequantize", Arguments::Devices::any, stream);
  const QuantizedMatrix from = matrix_of(arguments, matrix, false);
  const TensorView to = arguments.write(out, "out");
  nb::gil_scoped_release released;
  lowbit::dequantize(from, to, {}, arguments.runtime());
}

// Into storage that the format asks for, of which there is none here.
nb::list explain_quantize(nb::handle weights, const std::string& format, const std::string& rule, nb::handle importance,
                          float global_scale, const std::string& gpu) {
  Arguments arguments("explain_quantize", Arguments::Devices::any, kNoStream);
  const TensorView from = arguments.read(weights, "weights");
  if (from.rank != 2)
    throw Error("[explain_quantize] weights has " + std::to_string(from.rank) + " dimensions: it must be [N, K]");
  QuantizedMatrix to = lowbit::storage(lowbit::format_named(format), from.shape[0], from.shape[1]);
  std::uintptr_t next = kFirstStandIn;
  for (TensorView* part : {&to.codes, &to.scales, &to.zeros, &to.global_scale}) {
    if (!part->given()) continue;
    part->device = from.device;
    part->data = reinterpret_cast<void*>(next);
    next += static_cast<std::uintptr_t>(part->elements()) * size_of(part->dtype) + kFirstStandIn;
  }
  const lowbit::QuantizeOptions options{.rule = lowbit::rule_named(rule),
                                        .importance = arguments.read(importance, "importance"),
                                        .global_scale = global_scale};
  return told(gpu.empty() ? lowbit::explain_quantize(from, options, to)
                          : lowbit::explain_quantize_on(gpu_model_named(gpu), from, options, to));
}

// out: weights, or what stands in for them.
nb::list explain_dequantize(nb::handle out, const nb::tuple& matrix, const std::string& gpu) {
  Arguments arguments("explain_dequantize", Arguments::Devices::any, kNoStream);
  const QuantizedMatrix from = matrix_of(arguments, matrix, false);
  TensorView to = arguments.read(out, "out");
  to.device = from.codes.device;
  return told(gpu.empty() ? lowbit::explain_dequantize(from, to)
                          : lowbit::explain_dequantize_on(gpu_model_named(gpu), from, to));
}

// (sqnr, mean, max, max_row, max_column)
nb::tuple error(nb::handle weights, const nb::tuple& matrix, nb::handle row_sqnr, nb::handle row_max) {
  Arguments arguments("quantization_error");
  const TensorView from = arguments.read(weights, "weights");
  const QuantizedMatrix stored = matrix_of(arguments, matrix, false);
  const TensorView sqnr = arguments.write(row_sqnr, "row_sqnr"), largest = arguments.write(row_max, "row_max");
  lowbit::QuantizationError found;
  {
    nb::gil_scoped_release released;
    Scratch scratch;
    Runtime runtime;
    runtime.workspace = scratch.get(lowbit::quantization_error_workspace(from.shape[0]));  // checked to be the matrix's
    found = lowbit::quantization_error(from, stored, sqnr, largest, runtime);
  }
  return nb::make_tuple(found.sqnr, found.mean, found.max, found.max_row, found.max_column);
}

std::int64_t packed_bytes(const std::string& format, std::int64_t rows, std::int64_t columns, bool gated,
                          const std::string& order) {
  return packed_storage(lowbit::format_named(format), rows, columns, gated, weight_order_named(order)).data.shape[0];
}

// (order, why none serves)
nb::tuple packed_order(const std::string& format, std::int64_t rows, std::int64_t columns, bool gpu, bool gated,
                       bool int8_x, bool fp8_x) {
  const PackedUse use{gpu ? Device::cuda : Device::cpu, gated, int8_x, fp8_x};
  const PackedOrder found = packed_order_for(lowbit::format_named(format), rows, columns, use);
  return nb::make_tuple(name_of(found.order), found.refusal);
}

// (changed, max, max_row, max_column)
nb::tuple pack(const nb::tuple& matrix, bool gated, const std::string& order, nb::handle data, bool exact) {
  Arguments arguments("pack_weights");
  const QuantizedMatrix from = matrix_of(arguments, matrix, false);
  PackedWeights to = packed_storage(from.format, from.rows, from.columns, gated, weight_order_named(order));
  to.data = arguments.write(data, "data");
  PackingError found;
  {
    nb::gil_scoped_release released;
    found = pack_weights(from, to, {.exact = exact});
  }
  return nb::make_tuple(found.changed, found.max, found.max_row, found.max_column);
}

lowbit::Checkpoint* open_checkpoint(const std::vector<std::string>& paths, int gptq_version) {
  nb::gil_scoped_release released;
  return new lowbit::Checkpoint(lowbit::Checkpoint::open(paths, {.gptq_version = gptq_version}));
}

// The fields of heddle.lowbit.StoredLayer; column_order as bytes of int32.
nb::tuple describe_layer(const lowbit::StoredLayer& layer) {
  const bool known = layer.refusal.empty();
  const auto* order = reinterpret_cast<const char*>(layer.column_order.data());
  return nb::make_tuple(layer.name, known ? nb::cast(lowbit::name_of(layer.layout)) : nb::none(), layer.reason,
                        known ? nb::cast(lowbit::name_of(layer.format)) : nb::none(), layer.rows, layer.columns,
                        layer.experts, layer.gate_up_interleaved, nb::bytes(order, layer.column_order.size() * 4),
                        layer.refusal);
}

nb::list stored_layers(const lowbit::Checkpoint& checkpoint) {
  std::vector<lowbit::StoredLayer> layers;
  {
    nb::gil_scoped_release released;
    layers = checkpoint.layers();
  }
  nb::list out;
  for (const lowbit::StoredLayer& layer : layers) out.append(describe_layer(layer));
  return out;
}

void load_layer(const lowbit::Checkpoint& checkpoint, const std::string& name, const nb::tuple& out,
                std::int64_t expert, bool reorder_columns) {
  Arguments arguments("checkpoint");
  const QuantizedMatrix to = matrix_of(arguments, out, true);
  nb::gil_scoped_release released;
  checkpoint.load(name, to, {.expert = expert, .reorder_columns = reorder_columns});
}

// layers: (pattern, format) pairs. importance: None, or layer's name -> array or None. progress: None, or called with
// (tensor, format, bytes_done, bytes_total, layers_done, layers_total). Returns (layers, kept, files, bytes_before,
// bytes_after, quantization_config).
nb::tuple quantize_checkpoint(const std::string& input, const std::string& output, const std::string& format,
                              const std::string& rule, const std::vector<std::pair<std::string, std::string>>& layers,
                              const nb::object& importance, const std::vector<std::string>& importance_layers,
                              const nb::object& progress) {
  lowbit::QuantizeCheckpointOptions options;
  options.format = format;
  options.rule = lowbit::rule_named(rule);
  for (const auto& [pattern, wanted] : layers) options.layers.push_back({pattern, wanted});
  options.importance_layers = importance_layers;
  Arguments arguments("quantize_checkpoint");  // holds the importance of every layer until all is done
  if (!importance.is_none()) {
    options.importance = [&](const std::string& layer) {
      const nb::gil_scoped_acquire held;
      return arguments.read(importance(layer), "importance");
    };
  }
  options.progress = [&](const lowbit::QuantizeProgress& at) {
    const nb::gil_scoped_acquire held;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (progress.is_none()) return;
    progress(at.tensor, at.format, at.bytes_done, at.bytes_total, at.layers_done, at.layers_total);
  };
  lowbit::QuantizeReport report;
  {
    nb::gil_scoped_release released;
    report = lowbit::quantize_checkpoint(input, output, options);
  }
  nb::list changed;
  for (const lowbit::LayerReport& r : report.layers) {
    changed.append(nb::make_tuple(r.name, r.file, r.format, r.rule, nb::make_tuple(r.rows, r.columns), r.error.sqnr,
                                  r.error.mean, r.error.max, nb::make_tuple(r.error.max_row, r.error.max_column),
                                  r.bytes_before, r.bytes_after, r.global_scale));
  }
  nb::list copied;
  for (const lowbit::CopiedTensor& t : report.copied_3d) {
    copied.append(nb::make_tuple(t.name, t.file, nb::tuple(nb::cast(t.shape)), t.bytes));
  }
  return nb::make_tuple(changed, report.kept, copied, report.files, report.bytes_before, report.bytes_after,
                        report.quantization_config);
}

}  // namespace

void bind_lowbit(nb::module_& module) {
  module.def("lowbit_formats", &lowbit::format_names);
  module.def("lowbit_rules", &member_names<lowbit::ScaleRule>);
  module.def("lowbit_storage", &storage, nb::arg("format"), nb::arg("rows"), nb::arg("columns"));
  module.def("lowbit_quantize", &quantize, nb::arg("weights").none(), nb::arg("out"), nb::arg("rule"),
             nb::arg("importance").none(), nb::arg("global_scale"), nb::arg("stream") = 0);
  module.def("lowbit_dequantize", &dequantize, nb::arg("out").none(), nb::arg("matrix"), nb::arg("stream") = 0);
  module.def("explain_quantize", &explain_quantize, nb::arg("weights").none(), nb::arg("format"), nb::arg("rule"),
             nb::arg("importance").none(), nb::arg("global_scale"), nb::arg("gpu") = "");
  module.def("explain_dequantize", &explain_dequantize, nb::arg("out").none(), nb::arg("matrix"), nb::arg("gpu") = "");
  module.def("lowbit_error", &error, nb::arg("weights").none(), nb::arg("matrix"), nb::arg("row_sqnr").none(),
             nb::arg("row_max").none());
  module.def("lowbit_packed_bytes", &packed_bytes, nb::arg("format"), nb::arg("rows"), nb::arg("columns"),
             nb::arg("gated"), nb::arg("order"));
  module.def("lowbit_packed_order", &packed_order, nb::arg("format"), nb::arg("rows"), nb::arg("columns"),
             nb::arg("gpu"), nb::arg("gated") = false, nb::arg("int8_x") = false, nb::arg("fp8_x") = false);
  module.def("lowbit_pack", &pack, nb::arg("matrix"), nb::arg("gated"), nb::arg("order"), nb::arg("data"),
             nb::arg("exact") = false);
  module.def("quantize_checkpoint", &quantize_checkpoint, nb::arg("input"), nb::arg("output"), nb::arg("format"),
             nb::arg("rule"), nb::arg("layers"), nb::arg("importance").none(), nb::arg("importance_layers"),
             nb::arg("progress").none());
  module.def("layer_matches", &lowbit::matches, nb::arg("pattern"), nb::arg("name"));
  module.def("lowbit_linear_layer", &lowbit::linear_layer, nb::arg("name"));
  nb::class_<lowbit::Checkpoint>(module, "Checkpoint")
      .def_static("open", &open_checkpoint, nb::arg("paths"), nb::arg("gptq_version"), nb::rv_policy::take_ownership)
      .def("layers", &stored_layers)
      .def("layer", [](const lowbit::Checkpoint& c, const std::string& name) { return describe_layer(c.layer(name)); })
      .def("load", &load_layer, nb::arg("name"), nb::arg("out"), nb::arg("expert"), nb::arg("reorder_columns"));
}

}  // namespace heddle::python
