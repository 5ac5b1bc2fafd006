#include "heddle/sparse.h"

#include <nanobind/stl/string.h>

#include <cstdint>

#include "convert.h"
#include "heddle/explain.h"
#include "ops/sparse/sparse.h"

namespace heddle::python {
namespace {

BlockLists lists_of(Arguments& arguments, nb::handle blocks, nb::handle counts, nb::handle offsets, nb::handle masks,
                    nb::handle mask_ids, nb::handle block_size, nb::handle query_rows) {
  return {.blocks = arguments.read(blocks, "blocks"),
          .counts = arguments.read(counts, "counts"),
          .offsets = arguments.read(offsets, "offsets"),
          .block_size = arguments.integer(block_size, "block_size"),
          .query_rows = arguments.integer(query_rows, "query_rows"),
          .masks = arguments.read(masks, "masks"),
          .mask_ids = arguments.read(mask_ids, "mask_ids")};
}

// stream: the CUDA stream of tensors on a GPU, which is then the current one.
void forward(nb::handle q, nb::handle k, nb::handle v, nb::handle blocks, nb::handle counts, nb::handle offsets,
             nb::handle masks, nb::handle mask_ids, nb::handle block_size, nb::handle query_rows, nb::handle o,
             nb::handle lse, const nb::tuple& items, std::uintptr_t stream) {
  Arguments arguments("sparse_attention_forward", Arguments::Devices::any, stream);
  const TensorView q_view = arguments.read(q, "q"), k_view = arguments.read(k, "k"), v_view = arguments.read(v, "v");
  const BlockLists lists = lists_of(arguments, blocks, counts, offsets, masks, mask_ids, block_size, query_rows);
  const TensorView o_view = arguments.write(o, "out"), lse_view = arguments.write(lse, "lse_out");
  const AttentionOptions options = arguments.options(items);
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  sparse_attention_forward_with(q_view, k_view, v_view, lists, o_view, lse_view, options, arguments.runtime(),
                                [&](std::size_t bytes) { return scratch.get(bytes); }, {.o = "out", .lse = "lse_out"});
}

void backward(nb::handle q, nb::handle k, nb::handle v, nb::handle blocks, nb::handle counts, nb::handle offsets,
              nb::handle masks, nb::handle mask_ids, nb::handle block_size, nb::handle query_rows, nb::handle o,
              nb::handle lse, nb::handle d_o, nb::handle d_lse, nb::handle dq, nb::handle dk, nb::handle dv,
              nb::handle dbias, nb::handle dsink, const nb::tuple& items, std::uintptr_t stream) {
  Arguments arguments("sparse_attention_backward", Arguments::Devices::any, stream);
  const TensorView q_view = arguments.read(q, "q"), k_view = arguments.read(k, "k"), v_view = arguments.read(v, "v");
  const BlockLists lists = lists_of(arguments, blocks, counts, offsets, masks, mask_ids, block_size, query_rows);
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
  sparse_attention_backward_with(q_view, k_view, v_view, lists, o_view, lse_view, d_o_view, d_lse_view, gradients,
                                 options, arguments.runtime(), [&](std::size_t bytes) { return scratch.get(bytes); });
}

nb::list explain(nb::handle q, nb::handle k, nb::handle v, nb::handle blocks, nb::handle counts, nb::handle offsets,
                 nb::handle masks, nb::handle mask_ids, nb::handle block_size, nb::handle query_rows,
                 const nb::tuple& items, bool backward_pass, const std::string& gpu) {
  Arguments arguments("explain_sparse_attention", Arguments::Devices::any, kNoStream);
  const TensorView q_view = arguments.read(q, "q"), k_view = arguments.read(k, "k"), v_view = arguments.read(v, "v");
  const BlockLists lists = lists_of(arguments, blocks, counts, offsets, masks, mask_ids, block_size, query_rows);
  const AttentionOptions options = arguments.options(items);
  if (!gpu.empty()) {
    const GpuModel& model = gpu_model_named(gpu);
    return told(backward_pass ? explain_sparse_attention_backward_on(model, q_view, k_view, v_view, lists, {}, options)
                              : explain_sparse_attention_on(model, q_view, k_view, v_view, lists, options));
  }
  return told(backward_pass ? explain_sparse_attention_backward(q_view, k_view, v_view, lists, {}, options)
                            : explain_sparse_attention(q_view, k_view, v_view, lists, options));
}

}  // namespace

void bind_sparse(nb::module_& module) {
  module.def("sparse_attention_forward", &forward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("blocks").none(),
             nb::arg("counts").none(), nb::arg("offsets").none(), nb::arg("masks").none(), nb::arg("mask_ids").none(),
             nb::arg("block_size"), nb::arg("query_rows"), nb::arg("o"), nb::arg("lse").none(), nb::arg("options"),
             nb::arg("stream") = 0);
  module.def("sparse_attention_backward", &backward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("blocks").none(),
             nb::arg("counts").none(), nb::arg("offsets").none(), nb::arg("masks").none(), nb::arg("mask_ids").none(),
             nb::arg("block_size"), nb::arg("query_rows"), nb::arg("o"), nb::arg("lse"), nb::arg("d_o"),
             nb::arg("d_lse").none(), nb::arg("dq").none(), nb::arg("dk").none(), nb::arg("dv").none(),
             nb::arg("dbias").none(), nb::arg("dsink").none(), nb::arg("options"), nb::arg("stream") = 0);
  module.def("explain_sparse_attention", &explain, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("blocks").none(),
             nb::arg("counts").none(), nb::arg("offsets").none(), nb::arg("masks").none(), nb::arg("mask_ids").none(),
             nb::arg("block_size"), nb::arg("query_rows"), nb::arg("options"), nb::arg("backward"),
             nb::arg("gpu") = "");
}

}  // namespace heddle::python
