#include "options.h"

namespace heddle::python {

void take_scale(Arguments& arguments, nb::handle item, const char* words, AttentionOptions& out) {
  if (!item.is_none()) out.scale = static_cast<float>(arguments.number(item, words));
}

void take_dropout_p(Arguments& arguments, nb::handle item, const char* words, AttentionOptions& out) {
  out.dropout.p = static_cast<float>(arguments.number(item, words));
  // The library would say dropout.p, as its own options have it.
  if (!(out.dropout.p >= 0 && out.dropout.p < 1)) {
    arguments.refuse(words, text("is ", out.dropout.p, ": it must be in [0, 1)"));
  }
}

void take_dropout_seed(Arguments& arguments, nb::handle item, const char* words, AttentionOptions& out) {
  if (item.is_none()) return;
  out.dropout.seed = PyLong_AsUnsignedLongLongMask(item.ptr());
  if (PyErr_Occurred()) arguments.refuse_kind(item, words, "an integer");
}

AttentionOptions Arguments::options(const nb::tuple& items, const char* seqused_k_name) {
  AttentionOptions out;
  take_options(kOptionItems, *this, items, out, option_index("seqused_k"), seqused_k_name);
  return out;
}

namespace {

// Each enumeration whose members Python has as numbers: {kind: {name: number}}.
nb::dict codes() {
  nb::dict dtypes, causal, precision;
  for (auto code = static_cast<int>(DType::f32); code <= static_cast<int>(DType::i8); ++code) {
    dtypes[name_of(static_cast<DType>(code))] = code;
  }
  causal["none"] = static_cast<int>(Causal::none);
  causal["top_left"] = static_cast<int>(Causal::top_left);
  causal["bottom_right"] = static_cast<int>(Causal::bottom_right);
  precision["f32"] = static_cast<int>(Precision::f32);
  precision["tf32"] = static_cast<int>(Precision::tf32);
  precision["int8_qk"] = static_cast<int>(Precision::int8_qk);
  nb::dict out;
  out["dtype"] = dtypes;
  out["causal"] = causal;
  out["precision"] = precision;
  return out;
}

}  // namespace

void bind_options(nb::module_& module) {
  module.def(
      "option_names", [] { return names_of(kOptionItems); },
      "The items of the options tuple, which heddle._options has too.");
  module.def("codes", &codes, "The numbers of enumerations' members, which heddle._options has too.");
}

}  // namespace heddle::python
