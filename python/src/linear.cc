#include "heddle/linear.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "convert.h"
#include "heddle/error.h"
#include "heddle/explain.h"
#include "ops/linear/linear.h"
#include "options.h"

namespace heddle::python {
namespace {

// Packed weights as Python hands them over.
struct Parts {
  std::string format, order;
  std::int64_t rows = 0, columns = 0;
  bool gated = false;
  TensorView data, kept;
};

constexpr std::array kParts{
    OptionItem("format", take_text<&Parts::format>),
    OptionItem("rows", take_integer<&Parts::rows>),
    OptionItem("columns", take_integer<&Parts::columns>),
    OptionItem("gated", take_flag<&Parts::gated>),
    OptionItem("order", take_text<&Parts::order>),
    OptionItem("weights", take_array<&Parts::data>, "weights.data"),
    OptionItem("kept", take_array<&Parts::kept>, "weights.kept"),
};

PackedWeights packed_of(Arguments& arguments, const nb::tuple& items) {
  Parts parts;
  take_options(kParts, arguments, items, parts);
  PackedWeights packed = packed_storage(lowbit::format_named(parts.format), parts.rows, parts.columns, parts.gated,
                                        weight_order_named(parts.order));
  packed.data = parts.data;
  packed.device = packed.data.device;
  packed.kept = parts.kept;
  return packed;
}

constexpr std::array kItems{
    OptionItem("bias", take_array<&LinearOptions::bias>),
    OptionItem("residual", take_array<&LinearOptions::residual>),
    OptionItem("norm_weight", take_array<&LinearOptions::norm_weight>),
    OptionItem("norm_bias", take_array<&LinearOptions::norm_bias>),
    OptionItem("activation", take_named<&LinearOptions::activation, activation_named>),
    OptionItem("norm", take_named<&LinearOptions::norm, norm_named>),
    OptionItem("norm_eps", take_number<&LinearOptions::norm_eps>),
    OptionItem("int8_x", take_flag<&LinearOptions::int8_x>),
    OptionItem("batch_invariant", take_flag<&LinearOptions::batch_invariant>),
    OptionItem("force", take_text<&LinearOptions::force>),
};

LinearOptions options_of(Arguments& arguments, const nb::tuple& items) {
  LinearOptions options;
  take_options(kItems, arguments, items, options);
  return options;
}

// stream: the CUDA stream of tensors on a GPU, which is then the current one.
void forward(nb::handle x, const nb::tuple& packed, nb::handle y, const nb::tuple& items, std::uintptr_t stream) {
  Arguments arguments("linear_forward", Arguments::Devices::any, stream);
  const TensorView from = arguments.read(x, "x");
  const PackedWeights weights = packed_of(arguments, packed);
  const LinearOptions options = options_of(arguments, items);
  const TensorView to = arguments.write(y, "out");
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  linear_forward_with(
      from, weights, to, options, arguments.runtime(), [&](std::size_t bytes) { return scratch.get(bytes); }, "out");
}

// gpu: the name of a GPU that need not be here; "": where the tensors are.
nb::list explain(nb::handle x, const nb::tuple& packed, const nb::tuple& items, const std::string& gpu) {
  Arguments arguments("explain_linear", Arguments::Devices::any, kNoStream);
  const TensorView from = arguments.read(x, "x");
  const PackedWeights weights = packed_of(arguments, packed);
  const LinearOptions options = options_of(arguments, items);
  return told(gpu.empty() ? explain_linear(from, weights, options)
                          : explain_linear_on(gpu_model_named(gpu), from, weights, options));
}

// The gradients of x and of each vector that is given, of a call that explain() has taken.
nb::list explain_backward(nb::handle x, const nb::tuple& packed, const nb::tuple& items, const std::string& gpu) {
  Arguments arguments("explain_linear_backward", Arguments::Devices::any, kNoStream);
  const TensorView from = arguments.read(x, "x");
  const PackedWeights weights = packed_of(arguments, packed);
  const LinearOptions options = options_of(arguments, items);
  const auto gradient = [&](const TensorView& of) { return of.given() ? stand_in(of, from.dtype) : TensorView{}; };
  LinearGradients to;
  to.dx = gradient(from);
  to.dbias = gradient(options.bias);
  to.dnorm_weight = gradient(options.norm_weight);
  to.dnorm_bias = gradient(options.norm_bias);
  TensorView dy = from;
  dy.shape[from.rank - 1] = weights.gated ? weights.rows / 2 : weights.rows;
  dy = stand_in(dy, from.dtype);
  return told(gpu.empty() ? explain_linear_backward(dy, from, weights, to, options)
                          : explain_linear_backward_on(gpu_model_named(gpu), dy, from, weights, to, options));
}

void unpack(nb::handle out, const nb::tuple& packed, std::uintptr_t stream) {
  Arguments arguments("unpack_weights", Arguments::Devices::any, stream);
  const PackedWeights weights = packed_of(arguments, packed);
  const TensorView to = arguments.write(out, "out");
  nb::gil_scoped_release released;
  unpack_weights(weights, to, {}, arguments.runtime());
}

// out: the shape and dtype of the weights.
nb::list explain_unpack(nb::handle out, const nb::tuple& packed, const std::string& gpu) {
  Arguments arguments("explain_unpack_weights", Arguments::Devices::any, kNoStream);
  const PackedWeights weights = packed_of(arguments, packed);
  const TensorView shape = arguments.read(out, "out");
  TensorView to = stand_in(shape, shape.dtype);  // without an address, so that it shares none with the weights
  to.device = weights.device;
  return told(gpu.empty() ? explain_unpack_weights(weights, to)
                          : explain_unpack_weights_on(gpu_model_named(gpu), weights, to));
}

// gradients: (dx, dbias, dnorm_weight, dnorm_bias), each of them None if it is not wanted.
void backward(nb::handle dy, nb::handle x, const nb::tuple& packed, const nb::tuple& gradients, const nb::tuple& items,
              std::uintptr_t stream) {
  Arguments arguments("linear_backward", Arguments::Devices::any, stream);
  if (gradients.size() != 4) throw Error("[linear_backward] gradients must be a tuple of 4 items");
  const TensorView from = arguments.read(dy, "dy"), rows = arguments.read(x, "x");
  const PackedWeights weights = packed_of(arguments, packed);
  const LinearOptions options = options_of(arguments, items);
  LinearGradients to;
  to.dx = arguments.write(gradients[0], "dx");
  to.dbias = arguments.write(gradients[1], "dbias");
  to.dnorm_weight = arguments.write(gradients[2], "dnorm_weight");
  to.dnorm_bias = arguments.write(gradients[3], "dnorm_bias");
  CallScratch scratch(arguments);
  nb::gil_scoped_release released;
  Runtime runtime = arguments.runtime();
  runtime.workspace = scratch.get(linear_backward_workspace(from, rows, weights, to, options, runtime));
  linear_backward(from, rows, weights, to, options, runtime);
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def(
      "linear_option_names", [] { return names_of(kItems); },
      "The items of the options tuple, which heddle._linear_options has too.");
  module.def(
      "packed_part_names", [] { return names_of(kParts); },
      "The parts of packed weights, which heddle._linear_options has too.");
  module.def("linear_activations", &member_names<Activation>);
  module.def("linear_norms", &member_names<Norm>);
  module.def("linear_forward", &forward, nb::arg("x").none(), nb::arg("weights"), nb::arg("y").none(),
             nb::arg("options"), nb::arg("stream") = 0);
  module.def("explain_linear", &explain, nb::arg("x").none(), nb::arg("weights"), nb::arg("options"),
             nb::arg("gpu") = "");
  module.def("explain_linear_backward", &explain_backward, nb::arg("x").none(), nb::arg("weights"), nb::arg("options"),
             nb::arg("gpu") = "");
  module.def("explain_unpack_weights", &explain_unpack, nb::arg("out").none(), nb::arg("weights"), nb::arg("gpu") = "");
  module.def("unpack_weights", &unpack, nb::arg("out").none(), nb::arg("weights"), nb::arg("stream") = 0);
  module.def("linear_backward", &backward, nb::arg("dy").none(), nb::arg("x").none(), nb::arg("weights"),
             nb::arg("gradients"), nb::arg("options"), nb::arg("stream") = 0);
}

}  // namespace heddle::python
