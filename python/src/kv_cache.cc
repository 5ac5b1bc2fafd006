#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "convert.h"
#include "heddle/explain.h"
#include "heddle/kv_cache.h"
#include "ops/attention/attention.h"
#include "options.h"

namespace heddle::python {
namespace {

// Scales of a cache, which an append writes if there is one for each slot.
TensorView cache_scale(Arguments& arguments, nb::handle scale, const char* name) {
  const TensorView view = arguments.read(scale, name);
  const bool written = view.given() && view.rank == 3 && (view.shape[0] != 1 || view.shape[1] != 1);
  return written ? arguments.write(scale, name) : view;
}

// stream: the CUDA stream of tensors on a GPU, which is then the current one.
void rotary(nb::handle x, nb::handle out, nb::handle cos, nb::handle sin, bool interleaved, nb::handle offsets,
            std::uintptr_t stream) {
  Arguments arguments("apply_rotary", Arguments::Devices::any, stream);
  const TensorView x_view = arguments.read(x, "x"), out_view = arguments.write(out, "out");
  const Rotary table{arguments.read(cos, "cos"), arguments.read(sin, "sin"), interleaved};
  const TensorView offsets_view = arguments.read(offsets, "offsets");
  nb::gil_scoped_release released;
  apply_rotary(x_view, out_view, table, {.offsets = offsets_view}, arguments.runtime());
}

void append(nb::handle k_new, nb::handle v_new, nb::handle k_cache, nb::handle v_cache, nb::handle seqlens,
            nb::handle page_table, nb::handle cache_batch_idx, nb::handle cos, nb::handle sin, bool interleaved,
            nb::handle k_scale, nb::handle v_scale, std::uintptr_t stream) {
  Arguments arguments("append_kv_cache", Arguments::Devices::any, stream);
  const TensorView k_view = arguments.read(k_new, "k_new"), v_view = arguments.read(v_new, "v_new");
  const TensorView k_cache_view = arguments.write(k_cache, "k_cache"),
                   v_cache_view = arguments.write(v_cache, "v_cache");
  const TensorView seqlens_view = arguments.read(seqlens, "seqlens");
  const TensorView pages_view = arguments.read(page_table, "page_table");
  const TensorView rows_view = arguments.read(cache_batch_idx, "cache_batch_idx");
  const Rotary table{arguments.read(cos, "cos"), arguments.read(sin, "sin"), interleaved};
  const TensorView k_scale_view = cache_scale(arguments, k_scale, "k_scale"),
                   v_scale_view = cache_scale(arguments, v_scale, "v_scale");
  nb::gil_scoped_release released;
  append_kv_cache(k_view, v_view, k_cache_view, v_cache_view, seqlens_view,
                  {.rotary = table,
                   .page_table = pages_view,
                   .cache_batch_idx = rows_view,
                   .k_scale = k_scale_view,
                   .v_scale = v_scale_view},
                  arguments.runtime());
}

// gpu: the name of a GPU that need not be here; "": where the tensors are.
nb::list explain_rotary(nb::handle x, nb::handle cos, nb::handle sin, bool interleaved, nb::handle offsets,
                        const std::string& gpu) {
  Arguments arguments("explain_apply_rotary", Arguments::Devices::any, kNoStream);
  const TensorView x_view = arguments.read(x, "x");
  const Rotary table{arguments.read(cos, "cos"), arguments.read(sin, "sin"), interleaved};
  const RotaryOptions options{.offsets = arguments.read(offsets, "offsets")};
  return told(gpu.empty() ? explain_apply_rotary(x_view, x_view, table, options)
                          : explain_apply_rotary_on(gpu_model_named(gpu), x_view, x_view, table, options));
}

nb::list explain_append(nb::handle k_new, nb::handle v_new, nb::handle k_cache, nb::handle v_cache, nb::handle seqlens,
                        nb::handle page_table, nb::handle cache_batch_idx, nb::handle cos, nb::handle sin,
                        bool interleaved, nb::handle k_scale, nb::handle v_scale, const std::string& gpu) {
  Arguments arguments("explain_append_kv_cache", Arguments::Devices::any, kNoStream);
  const TensorView k_view = arguments.read(k_new, "k_new"), v_view = arguments.read(v_new, "v_new");
  const TensorView k_cache_view = arguments.read(k_cache, "k_cache"), v_cache_view = arguments.read(v_cache, "v_cache");
  const TensorView seqlens_view = arguments.read(seqlens, "seqlens");
  const AppendOptions options{.rotary = {arguments.read(cos, "cos"), arguments.read(sin, "sin"), interleaved},
                              .page_table = arguments.read(page_table, "page_table"),
                              .cache_batch_idx = arguments.read(cache_batch_idx, "cache_batch_idx"),
                              .k_scale = arguments.read(k_scale, "k_scale"),
                              .v_scale = arguments.read(v_scale, "v_scale")};
  return told(gpu.empty() ? explain_append_kv_cache(k_view, v_view, k_cache_view, v_cache_view, seqlens_view, options)
                          : explain_append_kv_cache_on(gpu_model_named(gpu), k_view, v_view, k_cache_view, v_cache_view,
                                                       seqlens_view, options));
}

// As attention_forward, with an append before it. Python names the lengths as append_kv_cache does.
void attend(nb::handle q, nb::handle k_new, nb::handle v_new, nb::handle k_cache, nb::handle v_cache, nb::handle o,
            nb::handle lse, nb::handle cos, nb::handle sin, bool interleaved, const nb::tuple& items,
            std::uintptr_t stream) {
  constexpr IndexName kLengthsName = IndexName::seqlens;
  Arguments arguments("attention_with_kv_cache", Arguments::Devices::any, stream);
  const TensorView q_view = arguments.read(q, "q");
  const TensorView k_view = arguments.read(k_new, "k_new"), v_view = arguments.read(v_new, "v_new");
  const TensorView k_cache_view = arguments.write(k_cache, "k_cache"),
                   v_cache_view = arguments.write(v_cache, "v_cache");
  const TensorView o_view = arguments.write(o, "out"), lse_view = arguments.write(lse, "lse_out");
  const Rotary table{arguments.read(cos, "cos"), arguments.read(sin, "sin"), interleaved};
  AttentionOptions options = arguments.options(items, name_of(kLengthsName));
  options.k_scale = cache_scale(arguments, items[option_index("k_scale")], "k_scale");
  options.v_scale = cache_scale(arguments, items[option_index("v_scale")], "v_scale");
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  attention_with_kv_cache_with(q_view, k_view, v_view, k_cache_view, v_cache_view, o_view, lse_view, table, options,
                               arguments.runtime(), [&](std::size_t bytes) { return scratch.get(bytes); }, kLengthsName,
                               {.o = "out", .lse = "lse_out"});
}

}  // namespace

void bind_kv_cache(nb::module_& module) {
  module.def("apply_rotary", &rotary, nb::arg("x"), nb::arg("out"), nb::arg("cos"), nb::arg("sin"),
             nb::arg("interleaved"), nb::arg("offsets").none(), nb::arg("stream") = 0);
  module.def("append_kv_cache", &append, nb::arg("k_new"), nb::arg("v_new"), nb::arg("k_cache"), nb::arg("v_cache"),
             nb::arg("seqlens"), nb::arg("page_table").none(), nb::arg("cache_batch_idx").none(), nb::arg("cos").none(),
             nb::arg("sin").none(), nb::arg("interleaved"), nb::arg("k_scale").none(), nb::arg("v_scale").none(),
             nb::arg("stream") = 0);
  module.def("explain_apply_rotary", &explain_rotary, nb::arg("x"), nb::arg("cos"), nb::arg("sin"),
             nb::arg("interleaved"), nb::arg("offsets").none(), nb::arg("gpu") = "");
  module.def("explain_append_kv_cache", &explain_append, nb::arg("k_new"), nb::arg("v_new"), nb::arg("k_cache"),
             nb::arg("v_cache"), nb::arg("seqlens"), nb::arg("page_table").none(), nb::arg("cache_batch_idx").none(),
             nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("interleaved"), nb::arg("k_scale").none(),
             nb::arg("v_scale").none(), nb::arg("gpu") = "");
  module.def("attention_with_kv_cache", &attend, nb::arg("q"), nb::arg("k_new"), nb::arg("v_new"), nb::arg("k_cache"),
             nb::arg("v_cache"), nb::arg("o"), nb::arg("lse").none(), nb::arg("cos").none(), nb::arg("sin").none(),
             nb::arg("interleaved"), nb::arg("options"), nb::arg("stream") = 0);
}

}  // namespace heddle::python
