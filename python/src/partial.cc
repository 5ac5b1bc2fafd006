#include "heddle/partial.h"

#include <cstdint>
#include <string>
#include <vector>

#include "convert.h"
#include "ops/partial.h"

namespace heddle::python {
namespace {

constexpr MergeNames kNames{.o = {"os[", "]"}, .lse = {"lses[", "]"}, .outputs = {.o = "out", .lse = "lse_out"}};

// Two sequences of as many arrays, those that are None not given.
std::vector<Partial> partials(Arguments& arguments, const nb::sequence& os, const nb::sequence& lses, bool written) {
  std::vector<Partial> out(nb::len(os));
  for (std::size_t n = 0; n < out.size(); ++n) {
    const std::string o = std::string(kNames.o[0]) + std::to_string(n) + kNames.o[1];
    const std::string lse = std::string(kNames.lse[0]) + std::to_string(n) + kNames.lse[1];
    const nb::object from = os[n], from_lse = lses[n];
    if (written) {
      out[n] = {arguments.write(from, o.c_str()), arguments.write(from_lse, lse.c_str())};
    } else {
      out[n] = {arguments.read(from, o.c_str()), arguments.read(from_lse, lse.c_str())};
    }
  }
  return out;
}

// stream: the CUDA stream of tensors on a GPU, which is then the current one.
void merge(const nb::sequence& os, const nb::sequence& lses, nb::handle sink, nb::handle out, nb::handle lse_out,
           std::uintptr_t stream) {
  Arguments arguments("merge_attention", Arguments::Devices::any, stream);
  const std::vector<Partial> read = partials(arguments, os, lses, false);
  const TensorView sink_view = arguments.read(sink, "sink"), out_view = arguments.write(out, "out"),
                   lse_view = arguments.write(lse_out, "lse_out");
  nb::gil_scoped_release released;
  merge_attention_as(kNames, read, out_view, lse_view, {.sink = sink_view}, arguments.runtime());
}

void merge_backward(const nb::sequence& os, const nb::sequence& lses, nb::handle sink, nb::handle d_o, nb::handle d_lse,
                    const nb::sequence& d_os, const nb::sequence& d_lses, nb::handle dsink, std::uintptr_t stream) {
  Arguments arguments("merge_attention_backward", Arguments::Devices::any, stream);
  const std::vector<Partial> read = partials(arguments, os, lses, false);
  const TensorView sink_view = arguments.read(sink, "sink"), d_o_view = arguments.read(d_o, "d_o"),
                   d_lse_view = arguments.read(d_lse, "d_lse");
  const std::vector<Partial> written = partials(arguments, d_os, d_lses, true);
  const TensorView dsink_view = arguments.write(dsink, "dsink");
  nb::gil_scoped_release released;
  merge_attention_backward_as(kNames, read, d_o_view, d_lse_view, written, dsink_view, {.sink = sink_view},
                              arguments.runtime());
}

}  // namespace

void bind_partial(nb::module_& module) {
  module.def("merge_attention", &merge, nb::arg("os"), nb::arg("lses"), nb::arg("sink").none(), nb::arg("out"),
             nb::arg("lse_out").none(), nb::arg("stream") = 0);
  module.def("merge_attention_backward", &merge_backward, nb::arg("os"), nb::arg("lses"), nb::arg("sink").none(),
             nb::arg("d_o"), nb::arg("d_lse").none(), nb::arg("d_os"), nb::arg("d_lses"), nb::arg("dsink").none(),
             nb::arg("stream") = 0);
}

}  // namespace heddle::python
