#include "options.h"

#include "heddle/error.h"

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
  if (items.size() != kOptionItems.size()) {
    throw Error(text("[heddle] the options must be a tuple of ", kOptionItems.size(), " items"));
  }
  AttentionOptions out;
  for (std::size_t i = 0; i < kOptionItems.size(); ++i) {
    const OptionItem& option = kOptionItems[i];
    const char* const words = i == option_index("seqused_k") ? seqused_k_name : option.words;
    option.take(*this, NB_TUPLE_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)), words, out);
  }
  return out;
}

void bind_options(nb::module_& module) {
  module.def(
      "option_names",
      [] {
        nb::list names;
        for (const OptionItem& option : kOptionItems) names.append(option.name);
        return nb::tuple(names);
      },
      "The items of the options tuple, which heddle._options has too.");
}

}  // namespace heddle::python
