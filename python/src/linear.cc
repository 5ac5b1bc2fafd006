#include "heddle/linear.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "heddle/error.h"
#include "heddle/explain.h"
#include "ops/linear.h"

namespace heddle::python {
namespace {

// Packed weights as Python hands them over: format, rows, columns, gated, order, data, kept.
PackedWeights packed_of(Arguments& arguments, const nb::tuple& parts) {
  if (parts.size() != 7) throw Error("[heddle] packed weights must be a tuple of 7 items");
  std::string format, order;
  std::int64_t rows = 0, columns = 0;
  bool gated = false;
  if (!nb::try_cast(parts[0], format) || !nb::try_cast(parts[1], rows) || !nb::try_cast(parts[2], columns) ||
      !nb::try_cast(parts[3], gated) || !nb::try_cast(parts[4], order)) {
    throw Error(
        "[linear] weights must have a format's name, a shape (N, K) of 64-bit integers, gated, a bool, and an " +
        std::string("order's name"));
  }
  PackedWeights packed = packed_storage(lowbit::format_named(format), rows, columns, gated, weight_order_named(order));
  packed.data = arguments.read(parts[5], "weights.data");
  packed.device = packed.data.device;
  packed.kept = arguments.read(parts[6], "weights.kept");
  return packed;
}

// The options as heddle.lowbit.product packs them: activation, bias, residual, norm, norm_weight, norm_bias, norm_eps,
// int8_x, batch_invariant, force.
LinearOptions options_of(Arguments& arguments, const nb::tuple& items) {
  if (items.size() != 10) throw Error("[linear] options must be a tuple of 10 items");
  LinearOptions options;
  std::string activation, norm;
  if (!nb::try_cast(items[0], activation)) throw Error("[linear] activation is no string");
  if (!nb::try_cast(items[3], norm)) throw Error("[linear] norm is no string");
  if (!nb::try_cast(items[6], options.norm_eps)) throw Error("[linear] norm_eps is no number");
  if (!nb::try_cast(items[7], options.int8_x) || !nb::try_cast(items[8], options.batch_invariant)) {
    throw Error("[linear] int8_x and batch_invariant must be bool");
  }
  if (!nb::try_cast(items[9], options.force)) throw Error("[linear] force is no string");
  options.activation = activation_named(activation);
  options.bias = arguments.read(items[1], "bias");
  options.residual = arguments.read(items[2], "residual");
  options.norm = norm_named(norm);
  options.norm_weight = arguments.read(items[4], "norm_weight");
  options.norm_bias = arguments.read(items[5], "norm_bias");
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

// For each its name, method, whether it could run, why it does not, seconds, bytes of workspace, chosen, seconds over
// those of a product of 16-bit weights, plan.
nb::list told_of_layers(const std::vector<Candidate>& candidates) {
  nb::list out;
  for (const Candidate& c : candidates) {
    out.append(
        nb::make_tuple(c.name, c.method, c.supported, c.reason, c.seconds, c.workspace, c.chosen, c.of_16bit, c.plan));
  }
  return out;
}

// gpu: the name of a GPU that need not be here; "": where the tensors are.
nb::list explain(nb::handle x, const nb::tuple& packed, const nb::tuple& items, const std::string& gpu) {
  Arguments arguments("explain_linear", Arguments::Devices::any, kNoStream);
  const TensorView from = arguments.read(x, "x");
  const PackedWeights weights = packed_of(arguments, packed);
  const LinearOptions options = options_of(arguments, items);
  return told_of_layers(gpu.empty() ? explain_linear(from, weights, options)
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
  return told_of_layers(gpu.empty() ? explain_linear_backward(dy, from, weights, to, options)
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
