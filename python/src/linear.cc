#include "heddle/linear.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "heddle/error.h"

namespace heddle::python {
namespace {

// Packed weights as Python hands them over: format, rows, columns, gated, data.
PackedWeights packed_of(Arguments& arguments, const nb::tuple& parts) {
  if (parts.size() != 5) throw Error("[heddle] packed weights must be a tuple of 5 items");
  std::string format;
  std::int64_t rows = 0, columns = 0;
  bool gated = false;
  if (!nb::try_cast(parts[0], format) || !nb::try_cast(parts[1], rows) || !nb::try_cast(parts[2], columns) ||
      !nb::try_cast(parts[3], gated)) {
    throw Error("[linear] weights must have a format's name, a shape (N, K) of 64-bit integers and gated, a bool");
  }
  PackedWeights packed = packed_storage(lowbit::format_named(format), rows, columns, gated);
  packed.data = arguments.read(parts[4], "weights.data");
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

void forward(nb::handle x, const nb::tuple& packed, nb::handle y, const std::string& activation, nb::handle bias,
             nb::handle residual, bool int8_x, bool batch_invariant, const std::string& force) {
  Arguments arguments("linear_forward");
  const Call call(arguments, x, packed, activation, bias, residual, int8_x, batch_invariant, force);
  const TensorView to = arguments.write(y, "y");
  nb::gil_scoped_release released;
  const Scratch scratch(linear_forward_workspace(call.x, call.weights, call.options));
  linear_forward(call.x, call.weights, to, call.options, scratch);
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def("linear_forward", &forward, nb::arg("x").none(), nb::arg("weights"), nb::arg("y").none(),
             nb::arg("activation"), nb::arg("bias").none(), nb::arg("residual").none(), nb::arg("int8_x"),
             nb::arg("batch_invariant"), nb::arg("force"));
}

}  // namespace heddle::python
