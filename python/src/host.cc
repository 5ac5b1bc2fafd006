#include "host.h"

#include <string_view>

#include "core/check.h"
#include "cuda/backend.h"
#include "cuda/stream_memory.h"
#include "cuda/validate.h"
#include "dlpack_exchange.h"
#include "heddle/error.h"

namespace heddle::python {

void Given::refuse(const std::string& what) const { throw Error(text("[", operation, "] ", name, " ", what)); }

bool dtype_of(nb::dlpack::dtype dtype, DType* out) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  if (dtype.lanes != 1) return false;
  if (code == Code::Float && dtype.bits == 32) return *out = DType::f32, true;
  if (code == Code::Float && dtype.bits == 16) return *out = DType::f16, true;
  if (code == Code::Bfloat && dtype.bits == 16) return *out = DType::bf16, true;
  if (code == Code::Int && dtype.bits == 32) return *out = DType::i32, true;
  if (dtype.code == dlpack::kFloat8E4m3fn && dtype.bits == 8) return *out = DType::f8e4m3, true;
  if (code == Code::Bool && dtype.bits == 8) return *out = DType::boolean, true;
  if (code == Code::UInt && dtype.bits == 8) return *out = DType::u8, true;
  if (code == Code::Int && dtype.bits == 8) return *out = DType::i8, true;
  return false;
}

std::int64_t int64_of(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

TensorView view_of(nb::handle data, nb::handle dtype, nb::handle shape, nb::handle stride, const Given& given) {
  const Py_ssize_t rank = PyTuple_Size(shape.ptr());
  if (rank < 0 || PyTuple_Size(stride.ptr()) != rank) throw nb::python_error();
  if (rank < 1 || rank > kMaxRank) given.refuse(rank_rule(rank));
  TensorView view;
  view.data = PyLong_AsVoidPtr(data.ptr());
  if (view.data == nullptr && PyErr_Occurred()) throw nb::python_error();
  view.dtype = static_cast<DType>(int64_of(dtype.ptr()));
  view.rank = static_cast<int>(rank);
  for (Py_ssize_t i = 0; i < rank; ++i) {
    view.shape[i] = int64_of(NB_TUPLE_GET_ITEM(shape.ptr(), i));
    view.stride[i] = int64_of(NB_TUPLE_GET_ITEM(stride.ptr(), i));
  }
  return view;
}

std::string dtype_rule(const Given& given) {
  const std::string_view name = given.name;
  for (const std::string_view index :
       {"cu_seqlens", "seqused", "seqlens", "page_table", "cache_", "offsets", "token_", "draft_"}) {
    if (name.starts_with(index)) return "it must be int32";
  }
  if (std::string_view(given.operation).find("sparse_attention") != std::string_view::npos &&
      (name == "blocks" || name == "counts")) {
    return "it must be int32";
  }
  for (const std::string_view stored : {"codes", "scales", "zeros", "global_scale"}) {
    if (name == stored) return "see heddle.lowbit.QuantizedTensor";
  }
  if (name == "lse_out") return "it must be float32";
  if (name == "mask") return "it must be bool (true = attend); pass numbers that are added as bias";
  return "it must be float32, float16 or bfloat16";
}

std::string rank_rule(std::int64_t rank) { return text("has ", rank, " dimensions: it must have 1 to ", kMaxRank); }

const char* runs_on() {
  return cuda::built() ? "Heddle runs on the CPU and on NVIDIA GPUs" : "this build of Heddle runs on the CPU";
}

void bind_hosts(nb::module_& module) {
  module.def("exchange_current_gpu", &cuda::exchange_current_gpu, nb::arg("gpu"));
  module.def(
      "wait_for", [](std::uintptr_t stream) { cuda::wait_for(reinterpret_cast<void*>(stream)); }, nb::arg("stream"),
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace heddle::python
