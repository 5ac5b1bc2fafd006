#include "heddle/int4_cache.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "convert.h"
#include "heddle/explain.h"
#include "ops/kv_cache/int4_cache.h"

namespace heddle::python {
namespace {

void append(nb::handle k_new, nb::handle v_new, nb::handle blocks, nb::handle k_tail, nb::handle v_tail,
            nb::handle page_table, nb::handle row_idx, nb::handle seqlens, nb::handle cos, nb::handle sin,
            bool interleaved, std::uintptr_t stream) {
  Arguments arguments("append_int4_cache", Arguments::Devices::any, stream);
  const TensorView k_view = arguments.read(k_new, "k_new"), v_view = arguments.read(v_new, "v_new");
  const Int4Cache cache{arguments.write(blocks, "blocks"), arguments.write(k_tail, "k_tail"),
                        arguments.write(v_tail, "v_tail"), arguments.read(page_table, "page_table"),
                        arguments.read(row_idx, "row_idx")};
  const TensorView seqlens_view = arguments.read(seqlens, "seqlens");
  const Rotary table{arguments.read(cos, "cos"), arguments.read(sin, "sin"), interleaved};
  nb::gil_scoped_release released;
  append_int4_cache(k_view, v_view, cache, seqlens_view, {.rotary = table}, arguments.runtime());
}

nb::list explain_append(nb::handle k_new, nb::handle v_new, nb::handle blocks, nb::handle k_tail, nb::handle v_tail,
                        nb::handle page_table, nb::handle row_idx, nb::handle seqlens, nb::handle cos, nb::handle sin,
                        bool interleaved, const std::string& gpu) {
  Arguments arguments("explain_append_int4_cache", Arguments::Devices::any, kNoStream);
  const TensorView k_view = arguments.read(k_new, "k_new"), v_view = arguments.read(v_new, "v_new");
  const Int4Cache cache{arguments.read(blocks, "blocks"), arguments.read(k_tail, "k_tail"),
                        arguments.read(v_tail, "v_tail"), arguments.read(page_table, "page_table"),
                        arguments.read(row_idx, "row_idx")};
  const TensorView seqlens_view = arguments.read(seqlens, "seqlens");
  const Int4AppendOptions options{.rotary = {arguments.read(cos, "cos"), arguments.read(sin, "sin"), interleaved}};
  return told(gpu.empty()
                  ? explain_append_int4_cache(k_view, v_view, cache, seqlens_view, options)
                  : explain_append_int4_cache_on(gpu_model_named(gpu), k_view, v_view, cache, seqlens_view, options));
}

void attend(nb::handle q, nb::handle blocks, nb::handle k_tail, nb::handle v_tail, nb::handle page_table,
            nb::handle row_idx, nb::handle o, nb::handle lse, const nb::tuple& items, std::uintptr_t stream) {
  Arguments arguments("attention_over_int4_cache", Arguments::Devices::any, stream);
  const TensorView q_view = arguments.read(q, "q");
  const Int4Cache cache{arguments.read(blocks, "blocks"), arguments.read(k_tail, "k_tail"),
                        arguments.read(v_tail, "v_tail"), arguments.read(page_table, "page_table"),
                        arguments.read(row_idx, "row_idx")};
  const TensorView o_view = arguments.write(o, "out"), lse_view = arguments.write(lse, "lse_out");
  const AttentionOptions options = arguments.options(items);
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  attention_over_int4_cache_with(q_view, cache, o_view, lse_view, options, arguments.runtime(),
                                 [&](std::size_t bytes) { return scratch.get(bytes); }, {.o = "out", .lse = "lse_out"});
}

nb::list explain_attend(nb::handle q, nb::handle blocks, nb::handle k_tail, nb::handle v_tail, nb::handle page_table,
                        nb::handle row_idx, const nb::tuple& items, const std::string& gpu) {
  Arguments arguments("explain_attention_over_int4_cache", Arguments::Devices::any, kNoStream);
  const TensorView q_view = arguments.read(q, "q");
  const Int4Cache cache{arguments.read(blocks, "blocks"), arguments.read(k_tail, "k_tail"),
                        arguments.read(v_tail, "v_tail"), arguments.read(page_table, "page_table"),
                        arguments.read(row_idx, "row_idx")};
  const AttentionOptions options = arguments.options(items);
  return told(gpu.empty() ? explain_attention_over_int4_cache(q_view, cache, options)
                          : explain_attention_over_int4_cache_on(gpu_model_named(gpu), q_view, cache, options));
}

}  // namespace

void bind_int4_cache(nb::module_& module) {
  module.def("append_int4_cache", &append, nb::arg("k_new"), nb::arg("v_new"), nb::arg("blocks"), nb::arg("k_tail"),
             nb::arg("v_tail"), nb::arg("page_table").none(), nb::arg("row_idx").none(), nb::arg("seqlens"),
             nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("interleaved"), nb::arg("stream") = 0);
  module.def("explain_append_int4_cache", &explain_append, nb::arg("k_new"), nb::arg("v_new"), nb::arg("blocks"),
             nb::arg("k_tail"), nb::arg("v_tail"), nb::arg("page_table").none(), nb::arg("row_idx").none(),
             nb::arg("seqlens"), nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("interleaved"),
             nb::arg("gpu") = "");
  module.def("attention_over_int4_cache", &attend, nb::arg("q"), nb::arg("blocks"), nb::arg("k_tail"),
             nb::arg("v_tail"), nb::arg("page_table").none(), nb::arg("row_idx").none(), nb::arg("o"),
             nb::arg("lse").none(), nb::arg("options"), nb::arg("stream") = 0);
  module.def("explain_attention_over_int4_cache", &explain_attend, nb::arg("q"), nb::arg("blocks"), nb::arg("k_tail"),
             nb::arg("v_tail"), nb::arg("page_table").none(), nb::arg("row_idx").none(), nb::arg("options"),
             nb::arg("gpu") = "");
  module.def("int4_cache_block_bytes", &int4_cache_block_bytes, nb::arg("D"), nb::arg("Dv"));
  module.def("int4_cache_blocks", &int4_cache_blocks, nb::arg("keys"));
}

}  // namespace heddle::python
