#include "heddle/linear.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "heddle/error.h"

namespace heddle::python {
namespace {

// Packed weights as Python hands them over: format, rows, columns, gated, order, data.
PackedWeights packed_of(Arguments& arguments, const nb::tuple& parts) {
  if (parts.size() != 6) throw Error("[heddle] packed weights must be a tuple of 6 items");
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
  return packed;
}

struct Call {
  TensorView x;
  PackedWeights weights;
  LinearOptions options;

  Call(Arguments& arguments, nb::handle from, const nb::tuple& packed, const std::string& activation, nb::handle bias,
       nb::handle residual, bool int8_x, bool batch_invariant, const std::string& force)
      : x(arguments.read(from, "x")), weights(packed_of(arguments, packed)) {
    options.activation = activation_named(activation);
    options.bias = arguments.read(bias, "bias");
    options.residual = arguments.read(residual, "residual");
    options.int8_x = int8_x;
    options.batch_invariant = batch_invariant;
    options.force = force;
  }
};

// stream: the CUDA stream of tensors on a GPU, which is then the current one.
void forward(nb::handle x, const nb::tuple& packed, nb::handle y, const std::string& activation, nb::handle bias,
             nb::handle residual, bool int8_x, bool batch_invariant, const std::string& force, std::uintptr_t stream) {
  Arguments arguments("linear_forward", Arguments::Devices::any);
  const Call call(arguments, x, packed, activation, bias, residual, int8_x, batch_invariant, force);
  const TensorView to = arguments.write(y, "y");
  Runtime runtime;
  runtime.stream = reinterpret_cast<void*>(stream);
  Scratch scratch;
  DeviceScratch device_scratch(arguments.gpu());  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  const std::size_t bytes = linear_forward_workspace(call.x, call.weights, call.options, runtime);
  runtime.workspace = call.x.device == Device::cuda ? device_scratch.get(bytes) : scratch.get(bytes);
  linear_forward(call.x, call.weights, to, call.options, runtime);
}

// Name, method, why it does not run, seconds, bytes of workspace, chosen.
nb::list explain(nb::handle x, const nb::tuple& packed, const std::string& activation, nb::handle bias,
                 nb::handle residual, bool int8_x, bool batch_invariant, const std::string& force) {
  Arguments arguments("explain_linear", Arguments::Devices::any);
  const Call call(arguments, x, packed, activation, bias, residual, int8_x, batch_invariant, force);
  nb::list out;
  for (const Candidate& c : explain_linear(call.x, call.weights, call.options)) {
    out.append(nb::make_tuple(c.name, c.method, c.supported, c.reason, c.seconds, c.workspace, c.chosen));
  }
  return out;
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def("linear_forward", &forward, nb::arg("x").none(), nb::arg("weights"), nb::arg("y").none(),
             nb::arg("activation"), nb::arg("bias").none(), nb::arg("residual").none(), nb::arg("int8_x"),
             nb::arg("batch_invariant"), nb::arg("force"), nb::arg("stream") = 0);
  module.def("explain_linear", &explain, nb::arg("x").none(), nb::arg("weights"), nb::arg("activation"),
             nb::arg("bias").none(), nb::arg("residual").none(), nb::arg("int8_x"), nb::arg("batch_invariant"),
             nb::arg("force"));
}

}  // namespace heddle::python
