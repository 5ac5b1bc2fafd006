#include "heddle/attention.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <new>

#include "convert.h"
#include "heddle/error.h"
#include "heddle/explain.h"
#include "ops/attention/attention.h"
#include "problem/philox.h"

namespace heddle::python {
namespace {

// [B, H, S, D] as [B, S, H, D] if that is how the tensor lies. Other ranks stay, for the checks to refuse.
TensorView rows_first(TensorView view, bool heads_first) {
  if (heads_first && view.rank == 4) {
    std::swap(view.shape[1], view.shape[2]);
    std::swap(view.stride[1], view.stride[2]);
  }
  return view;
}

// A gradient that came from autograd, on a GPU with rows of 16 bytes' multiples. Autograd makes others, of one element
// for a sum, of parts for a concatenation, and a copy costs less than a kernel that takes them.
TensorView read_gradient(Arguments& arguments, nb::object& d_o) {
  const TensorView view = arguments.read(d_o, "d_o");
  if (view.device != Device::cuda) return view;
  const auto row = 16 / static_cast<std::int64_t>(size_of(view.dtype));
  bool whole = view.stride[view.rank - 1] == 1;
  for (int i = 0; i < view.rank - 1; ++i) whole &= view.stride[i] % row == 0;
  if (whole) return view;
  d_o = d_o.attr("contiguous")();
  return arguments.read(d_o, "d_o");
}

// stream: the CUDA stream of tensors on a GPU, which is then the current one. heads_first: q, k, v, o and their
// gradients are [B, H, S, D].
void forward(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, const nb::tuple& items,
             bool heads_first, std::uintptr_t stream) {
  Arguments arguments("attention_forward", Arguments::Devices::any, stream);
  const auto read = [&](nb::handle x, const char* name) { return rows_first(arguments.read(x, name), heads_first); };
  const TensorView q_view = read(q, "q"), k_view = read(k, "k"), v_view = read(v, "v");
  const TensorView o_view = rows_first(arguments.write(o, "out"), heads_first),
                   lse_view = arguments.write(lse, "lse_out");
  const AttentionOptions options = arguments.options(items);
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  nb::gil_scoped_release released;
  attention_forward_with(q_view, k_view, v_view, o_view, lse_view, options, arguments.runtime(),
                         [&](std::size_t bytes) { return scratch.get(bytes); }, {.o = "out", .lse = "lse_out"});
}

void backward(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::object d_o, nb::handle d_lse,
              nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dbias, nb::handle dsink, const nb::tuple& items,
              bool heads_first, bool accumulate, bool merged, std::uintptr_t stream) {
  Arguments arguments("attention_backward", Arguments::Devices::any, stream);
  const auto read = [&](nb::handle x, const char* name) { return rows_first(arguments.read(x, name), heads_first); };
  const auto write = [&](nb::handle x, const char* name) { return rows_first(arguments.write(x, name), heads_first); };
  const TensorView q_view = read(q, "q"), k_view = read(k, "k"), v_view = read(v, "v"), o_view = read(o, "o");
  const TensorView lse_view = arguments.read(lse, "lse");
  const TensorView d_o_view = rows_first(read_gradient(arguments, d_o), heads_first),
                   d_lse_view = arguments.read(d_lse, "d_lse");
  AttentionGradients gradients;
  gradients.dq = write(dq, "dq");
  gradients.dk = write(dk, "dk");
  gradients.dv = write(dv, "dv");
  gradients.dbias = arguments.write(dbias, "dbias");
  gradients.dsink = arguments.write(dsink, "dsink");
  gradients.accumulate = accumulate;
  gradients.merged = merged;
  const AttentionOptions options = arguments.options(items);
  CallScratch scratch(arguments);
  nb::gil_scoped_release released;
  attention_backward_with(q_view, k_view, v_view, o_view, lse_view, d_o_view, d_lse_view, gradients, options,
                          arguments.runtime(), [&](std::size_t bytes) { return scratch.get(bytes); });
}

// gpu: the name of a GPU that need not be here; "": where the tensors are.
nb::list explain(nb::handle q, nb::handle k, nb::handle v, const nb::tuple& items, bool backward_pass,
                 const std::string& gpu) {
  Arguments arguments("explain_attention", Arguments::Devices::any, kNoStream);
  const TensorView q_view = arguments.read(q, "q"), k_view = arguments.read(k, "k"), v_view = arguments.read(v, "v");
  const AttentionOptions options = arguments.options(items);
  if (backward_pass) {
    return told(gpu.empty() ? explain_attention_backward(q_view, k_view, v_view, {}, options)
                            : explain_attention_backward_on(gpu_model_named(gpu), q_view, k_view, v_view, {}, options));
  }
  return told(gpu.empty() ? explain_attention(q_view, k_view, v_view, options)
                          : explain_attention_on(gpu_model_named(gpu), q_view, k_view, v_view, options));
}

// keep: bool [B, H, Sq, Sk]; true where dropout keeps the probability.
void dropout_mask(nb::handle keep, double p, std::uint64_t seed) {
  Arguments arguments("dropout_mask");
  const TensorView view = arguments.write(keep, "keep");
  if (view.rank != 4 || view.dtype != DType::boolean) throw Error("[dropout_mask] keep must be bool [B, H, Sq, Sk]");
  const Dropout dropout{static_cast<float>(p), seed, 0};
  nb::gil_scoped_release released;
  for (std::int64_t head = 0; head < view.shape[0] * view.shape[1]; ++head) {
    auto* plane =
        static_cast<bool*>(view.data) + head / view.shape[1] * view.stride[0] + head % view.shape[1] * view.stride[1];
    for (std::int64_t i = 0; i < view.shape[2]; ++i) {
      for (std::int64_t j = 0; j < view.shape[3]; ++j) {
        plane[i * view.stride[2] + j * view.stride[3]] = dropout_keeps(
            dropout, static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(j));
      }
    }
  }
}

// (shape, dtype code) of any array that Heddle can read.
nb::tuple describe(nb::handle object, const std::string& operation, const std::string& name) {
  Arguments arguments(operation.c_str(), Arguments::Devices::any, kNoStream);
  const TensorView view = arguments.read(object, name.c_str());
  if (!view.given()) throw Error("[" + operation + "] " + name + " is missing");
  nb::list shape;
  for (int i = 0; i < view.rank; ++i) shape.append(view.shape[i]);
  return nb::make_tuple(nb::tuple(shape), static_cast<int>(view.dtype));
}

// An owning, contiguous array that any DLPack consumer can take: numpy has no bfloat16.
nb::ndarray<nb::array_api> empty(const std::vector<std::int64_t>& shape, int dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto kind = static_cast<DType>(dtype);
  const Code code = kind == DType::bf16 ? Code::Bfloat : kind == DType::i32 ? Code::Int : Code::Float;
  const nb::dlpack::dtype type{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * size_of(kind)), 1};
  std::vector<std::size_t> extents(shape.begin(), shape.end());
  std::size_t bytes = size_of(kind);
  for (const std::size_t extent : extents) bytes *= extent;
  void* data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
  if (data == nullptr) throw std::bad_alloc();
  nb::capsule owner(data, [](void* memory) noexcept { std::free(memory); });
  return nb::ndarray<nb::array_api>(data, extents.size(), extents.data(), owner, nullptr, type);
}

}  // namespace

void bind_attention(nb::module_& module) {
  module.def("use_torch", &use_torch, nb::arg("tensor_type"), nb::arg("dtypes"), nb::arg("allocate"));
  module.def("attention_forward", &forward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("o"),
             nb::arg("lse").none(), nb::arg("options"), nb::arg("heads_first") = false, nb::arg("stream") = 0);
  module.def("attention_backward", &backward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("o"), nb::arg("lse"),
             nb::arg("d_o"), nb::arg("d_lse").none(), nb::arg("dq").none(), nb::arg("dk").none(), nb::arg("dv").none(),
             nb::arg("dbias").none(), nb::arg("dsink").none(), nb::arg("options"), nb::arg("heads_first") = false,
             nb::arg("accumulate") = false, nb::arg("merged") = false, nb::arg("stream") = 0);
  module.def("explain_attention", &explain, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("options"),
             nb::arg("backward"), nb::arg("gpu") = "");
  module.def("dropout_mask", &dropout_mask, nb::arg("keep"), nb::arg("p"), nb::arg("seed"));
  module.def("describe", &describe, nb::arg("array").none(), nb::arg("operation"), nb::arg("name"));
  module.def("empty", &empty, nb::arg("shape"), nb::arg("dtype"));
}

}  // namespace heddle::python
