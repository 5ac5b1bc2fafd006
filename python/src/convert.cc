#include "convert.h"

#include <string_view>

#include "heddle/error.h"

namespace heddle::python {
namespace {

// The dtypes that an argument of this name may have.
std::string rule_of(std::string_view name) {
  for (const std::string_view index :
       {"cu_seqlens", "seqused", "seqlens", "page_table", "cache_", "offsets", "token_"}) {
    if (name.starts_with(index)) return "it must be int32";
  }
  if (name == "mask") return "it must be bool (true = attend); pass numbers that are added as bias";
  return "it must be float32, float16 or bfloat16";
}

std::string name_of(nb::dlpack::dtype dtype) {
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  const char* kind = code == nb::dlpack::dtype_code::Float     ? "float"
                     : code == nb::dlpack::dtype_code::Bfloat  ? "bfloat"
                     : code == nb::dlpack::dtype_code::Int     ? "int"
                     : code == nb::dlpack::dtype_code::UInt    ? "uint"
                     : code == nb::dlpack::dtype_code::Complex ? "complex"
                                                               : nullptr;
  if (kind == nullptr) return "of an unknown dtype (DLPack code " + std::to_string(dtype.code) + ")";
  return kind + std::to_string(dtype.bits);
}

bool dtype_of(nb::dlpack::dtype dtype, DType* out) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  if (dtype.lanes != 1) return false;
  if (code == Code::Float && dtype.bits == 32) return *out = DType::f32, true;
  if (code == Code::Float && dtype.bits == 16) return *out = DType::f16, true;
  if (code == Code::Bfloat && dtype.bits == 16) return *out = DType::bf16, true;
  if (code == Code::Int && dtype.bits == 32) return *out = DType::i32, true;
  if (code == Code::Bool && dtype.bits == 8) return *out = DType::boolean, true;
  return false;
}

std::int64_t integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

}  // namespace

void Arguments::refuse(const char* name, const std::string& what) const {
  throw Error("[" + std::string(operation_) + "] " + name + " " + what);
}

TensorView Arguments::view(nb::handle object, const char* name, bool writable) {
  if (object.is_none()) return {};
  if (PyTuple_CheckExact(object.ptr())) return view_of_tuple(nb::borrow<nb::tuple>(object), name);
  return view_of_array(object, name, writable);
}

TensorView Arguments::view_of_tuple(const nb::tuple& parts, const char* name) const {
  if (parts.size() != 4) refuse(name, "is a tuple: it must be an array");
  PyObject* dtype = NB_TUPLE_GET_ITEM(parts.ptr(), 1);
  if (PyUnicode_Check(dtype)) refuse(name, "is " + std::string(PyUnicode_AsUTF8(dtype)) + ": " + rule_of(name));
  PyObject* shape = NB_TUPLE_GET_ITEM(parts.ptr(), 2);
  PyObject* stride = NB_TUPLE_GET_ITEM(parts.ptr(), 3);
  const Py_ssize_t rank = PyTuple_Size(shape);
  if (rank < 0 || PyTuple_Size(stride) != rank) throw nb::python_error();
  if (rank < 1 || rank > kMaxRank) {
    refuse(name, "has " + std::to_string(rank) + " dimensions: it must have 1 to " + std::to_string(kMaxRank));
  }
  TensorView view;
  view.data = PyLong_AsVoidPtr(NB_TUPLE_GET_ITEM(parts.ptr(), 0));
  if (view.data == nullptr && PyErr_Occurred()) throw nb::python_error();
  view.dtype = static_cast<DType>(integer(dtype));
  view.rank = static_cast<int>(rank);
  for (Py_ssize_t i = 0; i < rank; ++i) {
    view.shape[i] = integer(NB_TUPLE_GET_ITEM(shape, i));
    view.stride[i] = integer(NB_TUPLE_GET_ITEM(stride, i));
  }
  return view;
}

TensorView Arguments::view_of_array(nb::handle object, const char* name, bool writable) {
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(object, array)) {
    const nb::str type = nb::inst_name(object);
    refuse(name, "is a " + std::string(type.c_str()) + ": it must be an array that supports DLPack, such as numpy's");
  }
  if (writable) {
    nb::ndarray<> checked;
    if (!nb::try_cast(object, checked)) refuse(name, "is read-only: it is written, so it must be writable");
  }
  if (array.device_type() != nb::device::cpu::value) {
    refuse(name, "is not in CPU memory (DLPack device " + std::to_string(array.device_type()) +
                     "): this build of Heddle runs on the CPU");
  }
  TensorView view;
  if (!dtype_of(array.dtype(), &view.dtype)) refuse(name, "is " + name_of(array.dtype()) + ": " + rule_of(name));
  if (array.ndim() < 1 || array.ndim() > kMaxRank) {
    refuse(name, "has " + std::to_string(array.ndim()) + " dimensions: it must have 1 to " + std::to_string(kMaxRank));
  }
  view.data = const_cast<void*>(static_cast<const void*>(array.data()));
  view.rank = static_cast<int>(array.ndim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = static_cast<std::int64_t>(array.shape(i));
    view.stride[i] = array.stride(i);
  }
  held_.push_back(std::move(array));
  return view;
}

AttentionOptions Arguments::options(const nb::tuple& items) {
  if (items.size() != 24) throw Error("[heddle] the options must be a tuple of 24 items");
  const auto item = [&](int i) { return nb::handle(NB_TUPLE_GET_ITEM(items.ptr(), i)); };
  AttentionOptions out;
  out.alibi_slopes = read(item(0), "alibi_slopes");
  out.bias = read(item(1), "bias");
  out.mask = read(item(2), "mask");
  out.sink = read(item(3), "sink");
  out.cu_seqlens_q = read(item(4), "cu_seqlens_q");
  out.cu_seqlens_k = read(item(5), "cu_seqlens_k");
  out.seqused_q = read(item(6), "seqused_q");
  out.seqused_k = read(item(7), "seqused_k");
  out.page_table = read(item(8), "page_table");
  out.cache_batch_idx = read(item(9), "cache_batch_idx");
  out.cache_leftpad = read(item(10), "cache_leftpad");
  if (!item(11).is_none()) out.scale = static_cast<float>(nb::cast<double>(item(11)));
  out.causal = static_cast<Causal>(nb::cast<int>(item(12)));
  out.window_left = nb::cast<std::int64_t>(item(13));
  out.window_right = nb::cast<std::int64_t>(item(14));
  out.softcap = static_cast<float>(nb::cast<double>(item(15)));
  out.dropout.p = static_cast<float>(nb::cast<double>(item(16)));
  out.dropout.seed = nb::cast<std::uint64_t>(item(17));
  out.max_seqlen_q = nb::cast<std::int64_t>(item(18));
  out.max_seqlen_k = nb::cast<std::int64_t>(item(19));
  out.batch_invariant = nb::cast<bool>(item(20));
  out.deterministic = nb::cast<bool>(item(21));
  out.method = PyUnicode_AsUTF8(nb::cast<nb::str>(item(22)).ptr());
  out.force = PyUnicode_AsUTF8(nb::cast<nb::str>(item(23)).ptr());
  return out;
}

Scratch::Scratch(std::size_t bytes) {
  constexpr std::size_t kKept = std::size_t{32} << 20;
  thread_local WorkspaceBuffer small;
  if (bytes > 0) workspace_ = bytes <= kKept ? small.get(bytes) : large_.get(bytes);
}

Scratch::operator Runtime() const {
  Runtime runtime;
  runtime.workspace = workspace_;
  return runtime;
}

}  // namespace heddle::python
