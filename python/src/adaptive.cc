#include "heddle/adaptive.h"

#include <nanobind/stl/string.h>

#include <cstdint>

#include "convert.h"
#include "ops/adaptive/adaptive.h"

namespace heddle::python {
namespace {

AdaptiveOptions adaptive_of(Arguments& arguments, nb::handle tol, nb::handle on_exceed) {
  return {.tol = static_cast<float>(arguments.number(tol, "tol")),
          .on_exceed = on_exceed_named(arguments.string(on_exceed, "on_exceed"))};
}

// stream: as of the other operations; this one runs on the CPU alone, and says so.
void forward(nb::handle q, nb::handle k, nb::handle v, nb::handle tol, nb::handle on_exceed, nb::handle o,
             nb::handle lse, nb::handle bound, nb::handle replaced, const nb::tuple& items, std::uintptr_t stream) {
  Arguments arguments("adaptive_attention_forward", Arguments::Devices::any, stream);
  const TensorView q_view = arguments.read(q, "q"), k_view = arguments.read(k, "k"), v_view = arguments.read(v, "v");
  const AdaptiveOptions adaptive = adaptive_of(arguments, tol, on_exceed);
  AdaptiveOutputs outputs;
  outputs.o = arguments.write(o, "out");
  outputs.lse = arguments.write(lse, "lse");
  outputs.bound = arguments.write(bound, "bound");
  outputs.replaced = arguments.write(replaced, "replaced");
  const AttentionOptions options = arguments.options(items);
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  adaptive_attention_forward_with(q_view, k_view, v_view, outputs, adaptive, options, arguments.runtime(),
                                  [&](std::size_t bytes) { return scratch.get(bytes); }, {.o = "out", .lse = "lse"});
}

void backward(nb::handle q, nb::handle k, nb::handle v, nb::handle replaced, nb::handle o, nb::handle lse,
              nb::handle d_o, nb::handle d_lse, nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dbias,
              nb::handle dsink, const nb::tuple& items, std::uintptr_t stream) {
  Arguments arguments("adaptive_attention_backward", Arguments::Devices::any, stream);
  const TensorView q_view = arguments.read(q, "q"), k_view = arguments.read(k, "k"), v_view = arguments.read(v, "v");
  const TensorView replaced_view = arguments.read(replaced, "replaced");
  const TensorView o_view = arguments.read(o, "o"), lse_view = arguments.read(lse, "lse");
  const TensorView d_o_view = arguments.read(d_o, "d_o"), d_lse_view = arguments.read(d_lse, "d_lse");
  AttentionGradients gradients;
  gradients.dq = arguments.write(dq, "dq");
  gradients.dk = arguments.write(dk, "dk");
  gradients.dv = arguments.write(dv, "dv");
  gradients.dbias = arguments.write(dbias, "dbias");
  gradients.dsink = arguments.write(dsink, "dsink");
  const AttentionOptions options = arguments.options(items);
  CallScratch scratch(arguments);
  nb::gil_scoped_release released;
  adaptive_attention_backward_with(q_view, k_view, v_view, replaced_view, o_view, lse_view, d_o_view, d_lse_view,
                                   gradients, options, arguments.runtime(),
                                   [&](std::size_t bytes) { return scratch.get(bytes); });
}

nb::list explain(nb::handle q, nb::handle k, nb::handle v, nb::handle tol, const nb::tuple& items, bool backward_pass) {
  Arguments arguments("explain_adaptive_attention", Arguments::Devices::any, kNoStream);
  const TensorView q_view = arguments.read(q, "q"), k_view = arguments.read(k, "k"), v_view = arguments.read(v, "v");
  const AdaptiveOptions adaptive{.tol = static_cast<float>(arguments.number(tol, "tol"))};
  const AttentionOptions options = arguments.options(items);
  return told(backward_pass ? explain_adaptive_attention_backward(q_view, k_view, v_view, {}, {}, options)
                            : explain_adaptive_attention(q_view, k_view, v_view, adaptive, options));
}

}  // namespace

void bind_adaptive(nb::module_& module) {
  module.def("adaptive_attention_forward", &forward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("tol"),
             nb::arg("on_exceed"), nb::arg("o"), nb::arg("lse"), nb::arg("bound"), nb::arg("replaced").none(),
             nb::arg("options"), nb::arg("stream") = 0);
  module.def("adaptive_attention_backward", &backward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("replaced"),
             nb::arg("o"), nb::arg("lse"), nb::arg("d_o"), nb::arg("d_lse").none(), nb::arg("dq").none(),
             nb::arg("dk").none(), nb::arg("dv").none(), nb::arg("dbias").none(), nb::arg("dsink").none(),
             nb::arg("options"), nb::arg("stream") = 0);
  module.def("explain_adaptive_attention", &explain, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("tol"),
             nb::arg("options"), nb::arg("backward"));
}

}  // namespace heddle::python
