#include "heddle/partial.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <vector>

#include "convert.h"
#include "heddle/explain.h"
#include "ops/partial/partial.h"

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
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  merge_attention_with(kNames, read, out_view, lse_view, {.sink = sink_view}, arguments.runtime(),
                       [&](std::size_t bytes) { return scratch.get(bytes); });
}

void merge_backward(const nb::sequence& os, const nb::sequence& lses, nb::handle sink, nb::handle d_o, nb::handle d_lse,
                    const nb::sequence& d_os, const nb::sequence& d_lses, nb::handle dsink, std::uintptr_t stream) {
  Arguments arguments("merge_attention_backward", Arguments::Devices::any, stream);
  const std::vector<Partial> read = partials(arguments, os, lses, false);
  const TensorView sink_view = arguments.read(sink, "sink"), d_o_view = arguments.read(d_o, "d_o"),
                   d_lse_view = arguments.read(d_lse, "d_lse");
  const std::vector<Partial> written = partials(arguments, d_os, d_lses, true);
  const TensorView dsink_view = arguments.write(dsink, "dsink");
  CallScratch scratch(arguments);
  nb::gil_scoped_release released;
  merge_attention_backward_with(kNames, read, d_o_view, d_lse_view, written, dsink_view, {.sink = sink_view},
                                arguments.runtime(), [&](std::size_t bytes) { return scratch.get(bytes); });
}

// backward_pass: of all gradients. gpu: the name of a GPU that need not be here; "": where the tensors are.
nb::list explain(const nb::sequence& os, const nb::sequence& lses, nb::handle sink, bool float32_out,
                 bool backward_pass, const std::string& gpu) {
  Arguments arguments("explain_merge_attention", Arguments::Devices::any, kNoStream);
  const std::vector<Partial> read = partials(arguments, os, lses, false);
  const MergeOptions options{.sink = arguments.read(sink, "sink")};
  const TensorView& first = read.at(0).o;
  const TensorView o = stand_in(first, float32_out ? DType::f32 : first.dtype), lse = stand_in(read[0].lse, DType::f32);
  const GpuModel* const model = gpu.empty() ? nullptr : &gpu_model_named(gpu);
  // Checks what the gradients' call is made of, by the names that Python has for it.
  const std::vector<Candidate> forward = model == nullptr
                                             ? explain_merge_attention_as(kNames, read, o, lse, options, {})
                                             : explain_merge_attention_on_as(kNames, *model, read, o, lse, options, {});
  if (!backward_pass) return told(forward);
  std::vector<Partial> gradients;
  for (const Partial& part : read)
    gradients.push_back({stand_in(part.o, part.o.dtype), stand_in(part.lse, DType::f32)});
  const TensorView dsink = options.sink.given() ? stand_in(options.sink, DType::f32) : TensorView{};
  return told(model == nullptr ? explain_merge_attention_backward(read, o, lse, gradients, dsink, options)
                               : explain_merge_attention_backward_on(*model, read, o, lse, gradients, dsink, options));
}

}  // namespace

void bind_partial(nb::module_& module) {
  module.def("merge_attention", &merge, nb::arg("os"), nb::arg("lses"), nb::arg("sink").none(), nb::arg("out"),
             nb::arg("lse_out").none(), nb::arg("stream") = 0);
  module.def("merge_attention_backward", &merge_backward, nb::arg("os"), nb::arg("lses"), nb::arg("sink").none(),
             nb::arg("d_o"), nb::arg("d_lse").none(), nb::arg("d_os"), nb::arg("d_lses"), nb::arg("dsink").none(),
             nb::arg("stream") = 0);
  module.def("explain_merge_attention", &explain, nb::arg("os"), nb::arg("lses"), nb::arg("sink").none(),
             nb::arg("float32_out"), nb::arg("backward"), nb::arg("gpu") = "");
}

}  // namespace heddle::python
