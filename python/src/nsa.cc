#include "heddle/nsa.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "convert.h"
#include "heddle/explain.h"
#include "ops/attention/arguments.h"
#include "ops/nsa/nsa.h"

namespace heddle::python {
namespace {

PoolOptions pool_options(Arguments& arguments, nb::handle block, nb::handle stride, nb::handle cu_seqlens,
                         nb::handle seqused) {
  return {.block = arguments.integer(block, "block"),
          .stride = arguments.integer(stride, "stride"),
          .cu_seqlens = arguments.read(cu_seqlens, "cu_seqlens"),
          .seqused = arguments.read(seqused, "seqused")};
}

// stream: the CUDA stream of tensors on a GPU, which is then the current one.
void pool(nb::handle x, nb::handle out, nb::handle block, nb::handle stride, nb::handle cu_seqlens, nb::handle seqused,
          std::uintptr_t stream) {
  Arguments arguments("pool_keys", Arguments::Devices::any, stream);
  const TensorView x_view = arguments.read(x, "x"), out_view = arguments.write(out, "out");
  const PoolOptions options = pool_options(arguments, block, stride, cu_seqlens, seqused);
  nb::gil_scoped_release released;
  pool_keys(x_view, out_view, options, arguments.runtime(), "out");
}

// Of the keys that are used, the last `appended`.
void extend_pooled(nb::handle x, nb::handle pooled, nb::handle block, nb::handle stride, nb::handle seqused,
                   nb::handle appended, nb::handle page_table, std::uintptr_t stream) {
  Arguments arguments("extend_pooled_keys", Arguments::Devices::any, stream);
  const TensorView x_view = arguments.read(x, "x"), pooled_view = arguments.write(pooled, "k_pooled");
  PoolOptions options = pool_options(arguments, block, stride, nb::none(), seqused);
  options.appended = arguments.integer(appended, "appended");
  options.page_table = arguments.read(page_table, "page_table");
  nb::gil_scoped_release released;
  extend_pooled_keys(x_view, pooled_view, options, arguments.runtime());
}

void pool_backward(nb::handle d_pooled, nb::handle dx, nb::handle block, nb::handle stride, nb::handle cu_seqlens,
                   nb::handle seqused, std::uintptr_t stream) {
  Arguments arguments("pool_keys_backward", Arguments::Devices::any, stream);
  const TensorView d_pooled_view = arguments.read(d_pooled, "d_pooled"), dx_view = arguments.write(dx, "dx");
  const PoolOptions options = pool_options(arguments, block, stride, cu_seqlens, seqused);
  nb::gil_scoped_release released;
  pool_keys_backward(d_pooled_view, dx_view, options, arguments.runtime());
}

// From the bits of the first, the previous and the current block.
ForcedBlocks forced_blocks(unsigned bits) {
  return {.first = (bits & 1) != 0, .previous = (bits & 2) != 0, .current = (bits & 4) != 0};
}

SelectOptions select_options(Arguments& arguments, nb::handle block_size, nb::handle compression_block,
                             nb::handle compression_stride, unsigned forced, nb::handle scale, nb::handle cu_seqlens_q,
                             nb::handle cu_seqlens_k, nb::handle seqused_k, nb::handle page_table, nb::handle q_offset,
                             nb::handle q_step, nb::handle max_seqlen_q, nb::handle max_seqlen_k) {
  SelectOptions options;
  options.block_size = arguments.integer(block_size, "block_size");
  if (!compression_block.is_none()) {
    options.compression_block = arguments.integer(compression_block, "compression_block");
  }
  if (!compression_stride.is_none()) {
    options.compression_stride = arguments.integer(compression_stride, "compression_stride");
  }
  options.forced = forced_blocks(forced);
  if (!scale.is_none()) options.scale = static_cast<float>(arguments.number(scale, "scale"));
  options.cu_seqlens_q = arguments.read(cu_seqlens_q, "cu_seqlens_q");
  options.cu_seqlens_k = arguments.read(cu_seqlens_k, "cu_seqlens_k");
  options.seqused_k = arguments.read(seqused_k, "seqused_k");
  options.page_table = arguments.read(page_table, "page_table");
  options.q_offset = arguments.read(q_offset, "q_offset");
  options.q_step = arguments.integer(q_step, "q_step");
  options.max_seqlen_q = arguments.integer(max_seqlen_q, "max_seqlen_q");
  options.max_seqlen_k = arguments.integer(max_seqlen_k, "max_seqlen_k");
  return options;
}

void select(nb::handle q, nb::handle k_pooled, nb::handle lse, nb::handle out, nb::handle block_size,
            nb::handle compression_block, nb::handle compression_stride, unsigned forced, nb::handle scale,
            nb::handle cu_seqlens_q, nb::handle cu_seqlens_k, nb::handle seqused_k, nb::handle page_table,
            nb::handle q_offset, nb::handle q_step, nb::handle max_seqlen_q, nb::handle max_seqlen_k,
            std::uintptr_t stream) {
  Arguments arguments("select_blocks", Arguments::Devices::any, stream);
  const TensorView q_view = arguments.read(q, "q"), k_view = arguments.read(k_pooled, "k_pooled");
  const TensorView lse_view = arguments.read(lse, "lse"), out_view = arguments.write(out, "out");
  const SelectOptions options =
      select_options(arguments, block_size, compression_block, compression_stride, forced, scale, cu_seqlens_q,
                     cu_seqlens_k, seqused_k, page_table, q_offset, q_step, max_seqlen_q, max_seqlen_k);
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  select_blocks_with(
      q_view, k_view, lse_view, out_view, options, arguments.runtime(),
      [&](std::size_t bytes) { return scratch.get(bytes); }, "out");
}

// An operand beside x of which a question reads nothing.
TensorView beside(const TensorView& x, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view = x;
  view.rank = static_cast<int>(shape.size());
  std::ranges::copy(shape, view.shape.begin());
  return stand_in(view, dtype);
}

nb::list explain_pool(nb::handle x, nb::handle block, nb::handle stride, bool backward_pass, const std::string& gpu) {
  Arguments arguments("explain_pool_keys", Arguments::Devices::any, kNoStream);
  const TensorView keys = arguments.read(x, "x");
  const PoolOptions options = pool_options(arguments, block, stride, nb::none(), nb::none());
  const std::int64_t blocks =
      options.stride < 1 || keys.shape[1] < options.block ? 0 : (keys.shape[1] - options.block) / options.stride + 1;
  const TensorView pooled = beside(keys, keys.dtype, {keys.shape[0], blocks, keys.shape[2], keys.shape[3]});
  if (gpu.empty()) {
    return told(backward_pass ? explain_pool_keys_backward(pooled, keys, options)
                              : explain_pool_keys(keys, pooled, options));
  }
  const GpuModel& model = gpu_model_named(gpu);
  return told(backward_pass ? explain_pool_keys_backward_on(model, pooled, keys, options)
                            : explain_pool_keys_on(model, keys, pooled, options));
}

// with_lse: whether the compressed branch's lse will be there.
nb::list explain_select(nb::handle q, nb::handle k_pooled, std::int64_t n, bool with_lse, nb::handle block_size,
                        nb::handle compression_block, nb::handle compression_stride, unsigned forced, nb::handle scale,
                        nb::handle q_step, const std::string& gpu) {
  Arguments arguments("explain_select_blocks", Arguments::Devices::any, kNoStream);
  const TensorView rows = arguments.read(q, "q"), keys = arguments.read(k_pooled, "k_pooled");
  const nb::int_ unknown(0);
  const SelectOptions options =
      select_options(arguments, block_size, compression_block, compression_stride, forced, scale, nb::none(),
                     nb::none(), nb::none(), nb::none(), nb::none(), q_step, unknown, unknown);
  const TensorView lse =
      with_lse ? beside(rows, DType::f32, {rows.shape[0], rows.shape[2], rows.shape[1]}) : TensorView{};
  const TensorView blocks = beside(rows, DType::i32, {rows.shape[0], rows.shape[1], keys.shape[2], n});
  return told(gpu.empty() ? explain_select_blocks(rows, keys, lse, blocks, options)
                          : explain_select_blocks_on(gpu_model_named(gpu), rows, keys, lse, blocks, options));
}

// Sequences of as many arrays; of those that are written each may be None.
std::vector<GatedBranch> branches(Arguments& arguments, const nb::sequence& os, const nb::sequence& gates,
                                  bool written) {
  const std::string prefix = written ? "d_" : "";
  std::vector<GatedBranch> out(nb::len(os));
  for (std::size_t n = 0; n < out.size(); ++n) {
    const std::string at = "s[" + std::to_string(n) + "]", o = prefix + "o" + at, gate = prefix + "gate" + at;
    const nb::object of_o = os[n], of_gate = gates[n];
    if (written) {
      out[n] = {arguments.write(of_o, o.c_str()), arguments.write(of_gate, gate.c_str())};
    } else {
      out[n] = {arguments.read(of_o, o.c_str()), arguments.read(of_gate, gate.c_str())};
    }
  }
  return out;
}

void gate(const nb::sequence& os, const nb::sequence& gates, nb::handle out, const std::string& force,
          std::uintptr_t stream) {
  Arguments arguments("gate_branches", Arguments::Devices::any, stream);
  const std::vector<GatedBranch> read = branches(arguments, os, gates, false);
  const TensorView out_view = arguments.write(out, "out");
  nb::gil_scoped_release released;
  gate_branches(read, out_view, arguments.runtime(), force);
}

// A step of decoding. cache, gates: k, v, k_pooled, v_pooled, lengths and page_table, None where there are no pages; of
// cmp, slc and swa, None where there is no branch.
struct Step {
  Arguments arguments;
  TensorView q, k_new, v_new, out;
  NsaCache cache;
  NsaGates gates;
  NsaStepOptions options;

  Step(const char* operation, std::uintptr_t stream) : arguments(operation, Arguments::Devices::any, stream) {}
  void read(nb::handle of_q, nb::handle of_k, nb::handle of_v, const nb::tuple& of_cache, const nb::tuple& of_gates,
            nb::handle of_out, nb::handle block_count, nb::handle block_size, nb::handle window, unsigned forced,
            nb::handle scale, const std::string& force) {
    if (of_cache.size() != 6) throw Error("[heddle] the cache must be a tuple of 6 items");
    if (of_gates.size() != 3) throw Error("[heddle] the gates must be a tuple of 3 items");
    q = arguments.read(of_q, "q");
    k_new = arguments.read(of_k, "k_new");
    v_new = arguments.read(of_v, "v_new");
    cache.k = arguments.write(of_cache[0], "cache.k");
    cache.v = arguments.write(of_cache[1], "cache.v");
    cache.k_pooled = arguments.write(of_cache[2], "cache.k_pooled");
    cache.v_pooled = arguments.write(of_cache[3], "cache.v_pooled");
    cache.lengths = arguments.read(of_cache[4], "cache.lengths");
    cache.page_table = arguments.read(of_cache[5], "cache.page_table");
    gates.cmp = arguments.read(of_gates[0], "g_cmp");
    gates.slc = arguments.read(of_gates[1], "g_slc");
    gates.swa = arguments.read(of_gates[2], "g_swa");
    out = arguments.write(of_out, "out");
    options.block_count = arguments.integer(block_count, "block_count");
    options.block_size = arguments.integer(block_size, "block_size");
    options.window = arguments.integer(window, "window");
    options.forced = forced_blocks(forced);
    if (!scale.is_none()) options.scale = static_cast<float>(arguments.number(scale, "scale"));
    options.force = force;
  }
};

void step(nb::handle q, nb::handle k_new, nb::handle v_new, const nb::tuple& cache, const nb::tuple& gates,
          nb::handle out, nb::handle block_count, nb::handle block_size, nb::handle window, unsigned forced,
          nb::handle scale, const std::string& force, std::uintptr_t stream) {
  Step call("nsa_step", stream);
  call.read(q, k_new, v_new, cache, gates, out, block_count, block_size, window, forced, scale, force);
  CallScratch scratch(call.arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  nsa_step_with(call.q, call.k_new, call.v_new, call.cache, call.gates, call.out, call.options,
                call.arguments.runtime(), [&](std::size_t bytes) { return scratch.get(bytes); });
}

nb::list explain_step(nb::handle q, nb::handle k_new, nb::handle v_new, const nb::tuple& cache, const nb::tuple& gates,
                      nb::handle out, nb::handle block_count, nb::handle block_size, nb::handle window, unsigned forced,
                      nb::handle scale, const std::string& gpu) {
  Step call("explain_nsa_step", kNoStream);
  call.read(q, k_new, v_new, cache, gates, out, block_count, block_size, window, forced, scale, "");
  const auto answer = [&](const auto& explain, const auto&... model) {
    return told(
        explain(model..., call.q, call.k_new, call.v_new, call.cache, call.gates, call.out, call.options, Runtime{}));
  };
  return gpu.empty() ? answer(explain_nsa_step) : answer(explain_nsa_step_on, gpu_model_named(gpu));
}

// Refuses what an operation that is made of others cannot write its result to: memory that overlaps itself, or what the
// call has besides. Reads no data.
void check_out(const std::string& operation, nb::handle out, const std::vector<std::string>& names,
               const nb::sequence& tensors) {
  Arguments arguments(operation.c_str(), Arguments::Devices::any, kNoStream);
  const TensorView out_view = arguments.write(out, "out");
  std::vector<TensorView> views(names.size());
  std::vector<Named> inputs;
  for (std::size_t n = 0; n < names.size(); ++n) {
    const nb::object tensor = tensors[n];
    views[n] = arguments.read(tensor, names[n].c_str());
    inputs.emplace_back(names[n].c_str(), &views[n]);
  }
  const Check check(operation);
  check.not_overlapping(out_view, "out");
  const Named outputs[] = {{"out", &out_view}};
  check_apart(check, outputs, inputs);
}

void gate_backward(const nb::sequence& os, const nb::sequence& gates, nb::handle d_out, const nb::sequence& d_os,
                   const nb::sequence& d_gates, const std::string& force, std::uintptr_t stream) {
  Arguments arguments("gate_branches_backward", Arguments::Devices::any, stream);
  const std::vector<GatedBranch> read = branches(arguments, os, gates, false);
  const TensorView d_out_view = arguments.read(d_out, "d_out");
  const std::vector<GatedBranch> written = branches(arguments, d_os, d_gates, true);
  nb::gil_scoped_release released;
  gate_branches_backward(read, d_out_view, written, arguments.runtime(), force);
}

}  // namespace

void bind_nsa(nb::module_& module) {
  module.def("pool_keys", &pool, nb::arg("x"), nb::arg("out"), nb::arg("block"), nb::arg("stride"),
             nb::arg("cu_seqlens").none(), nb::arg("seqused").none(), nb::arg("stream") = 0);
  module.def("extend_pooled_keys", &extend_pooled, nb::arg("x"), nb::arg("k_pooled"), nb::arg("block"),
             nb::arg("stride"), nb::arg("seqused"), nb::arg("appended"), nb::arg("page_table").none(),
             nb::arg("stream") = 0);
  module.def("pool_keys_backward", &pool_backward, nb::arg("d_pooled"), nb::arg("dx"), nb::arg("block"),
             nb::arg("stride"), nb::arg("cu_seqlens").none(), nb::arg("seqused").none(), nb::arg("stream") = 0);
  module.def("select_blocks", &select, nb::arg("q"), nb::arg("k_pooled"), nb::arg("lse").none(), nb::arg("out"),
             nb::arg("block_size"), nb::arg("compression_block").none(), nb::arg("compression_stride").none(),
             nb::arg("forced"), nb::arg("scale").none(), nb::arg("cu_seqlens_q").none(), nb::arg("cu_seqlens_k").none(),
             nb::arg("seqused_k").none(), nb::arg("page_table").none(), nb::arg("q_offset").none(), nb::arg("q_step"),
             nb::arg("max_seqlen_q"), nb::arg("max_seqlen_k"), nb::arg("stream") = 0);
  module.def("explain_pool_keys", &explain_pool, nb::arg("x"), nb::arg("block"), nb::arg("stride"), nb::arg("backward"),
             nb::arg("gpu") = "");
  module.def("explain_select_blocks", &explain_select, nb::arg("q"), nb::arg("k_pooled"), nb::arg("n"),
             nb::arg("with_lse"), nb::arg("block_size"), nb::arg("compression_block").none(),
             nb::arg("compression_stride").none(), nb::arg("forced"), nb::arg("scale").none(), nb::arg("q_step"),
             nb::arg("gpu") = "");
  module.def("gate_branches", &gate, nb::arg("os"), nb::arg("gates"), nb::arg("out"), nb::arg("force"),
             nb::arg("stream") = 0);
  const auto step_options = [&](const char* name, auto* function, const auto&... last) {
    module.def(name, function, nb::arg("q"), nb::arg("k_new"), nb::arg("v_new"), nb::arg("cache"), nb::arg("gates"),
               nb::arg("out"), nb::arg("block_count"), nb::arg("block_size"), nb::arg("window"), nb::arg("forced"),
               nb::arg("scale").none(), last...);
  };
  step_options("nsa_step", &step, nb::arg("force"), nb::arg("stream") = 0);
  step_options("explain_nsa_step", &explain_step, nb::arg("gpu") = "");
  module.def("check_out", &check_out, nb::arg("operation"), nb::arg("out"), nb::arg("names"), nb::arg("tensors"));
  module.def("gate_branches_backward", &gate_backward, nb::arg("os"), nb::arg("gates"), nb::arg("d_out"),
             nb::arg("d_os"), nb::arg("d_gates"), nb::arg("force"), nb::arg("stream") = 0);
}

}  // namespace heddle::python
