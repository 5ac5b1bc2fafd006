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

namespace {

constexpr const char *kFloats = "it must be float32, float16 or bfloat16", *kFloat32 = "it must be float32",
                     *kInt32 = "it must be int32", *kUint8 = "it must be uint8",
                     *kStored = "see heddle.lowbit.QuantizedTensor",
                     *kMask = "it must be bool (true = attend); pass numbers that are added as bias";

// The dtypes of arguments by their names, of lists without the index; kFloats where there is no line. operation: a part
// of the names of those that the line is about, of the others' too if empty.
struct DTypeLine {
  std::string_view name;
  const char* rule;
  std::string_view operation = {};
};
constexpr DTypeLine kDTypes[] = {
    {"alibi_slopes", kFloat32},
    {"blocks", kInt32, "select_blocks"},
    {"blocks", kInt32, "sparse_attention"},
    {"blocks", kUint8, "int4_cache"},
    {"cache_batch_idx", kInt32},
    {"cache_leftpad", kInt32},
    {"codes", kStored},
    {"counts", kInt32},
    {"cu_seqlens", kInt32},
    {"cu_seqlens_k", kInt32},
    {"cu_seqlens_q", kInt32},
    {"d_lse", kFloat32},
    {"draft_mask", kInt32},
    {"embeddings", kFloat32},
    {"global_scale", kStored},
    {"hidden_states", kFloat32},
    {"importance", kFloat32},
    {"k_scale", kFloat32},
    {"key_offset", kInt32},
    {"lse", kFloat32},
    {"lse_out", kFloat32},
    {"lses", kFloat32},
    {"mask", kMask},
    {"mask_ids", kInt32},
    {"masks", kInt32},
    {"offsets", kInt32},
    {"page_table", kInt32},
    {"q_offset", kInt32},
    {"q_scale", kFloat32},
    {"row_idx", kInt32},
    {"scales", kStored},
    {"seqlens", kInt32},
    {"seqused", kInt32},
    {"seqused_k", kInt32},
    {"seqused_q", kInt32},
    {"sink", kFloat32},
    {"token_ids", kInt32},
    {"v_scale", kFloat32},
    {"weights.data", kUint8},
    {"zeros", kStored},
};

}  // namespace

const char* dtype_rule(const Given& given) {
  const std::string_view operation = given.operation, all = given.name, name = all.substr(0, all.find('['));
  for (const DTypeLine& line : kDTypes) {
    if (line.name == name && operation.find(line.operation) != std::string_view::npos) return line.rule;
  }
  return kFloats;
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
