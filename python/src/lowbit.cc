#include "heddle/lowbit.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "heddle/error.h"

namespace heddle::python {
namespace {

using lowbit::QuantizedMatrix;

// (shape, DType's number), or None.
nb::object describe(const TensorView& view) {
  if (!view.given()) return nb::none();
  nb::list shape;
  for (int i = 0; i < view.rank; ++i) shape.append(view.shape[i]);
  return nb::make_tuple(nb::tuple(shape), static_cast<int>(view.dtype));
}

// Of codes, scales, zeros and global_scale.
nb::tuple storage(const std::string& format, std::int64_t rows, std::int64_t columns) {
  const QuantizedMatrix m = lowbit::storage(lowbit::format_named(format), rows, columns);
  return nb::make_tuple(describe(m.codes), describe(m.scales), describe(m.zeros), describe(m.global_scale));
}

// numpy has no e4m3: its bits come as uint8.
TensorView as_stored(TensorView view, DType wanted) {
  if (view.dtype == DType::u8 && wanted == DType::f8e4m3) view.dtype = wanted;
  return view;
}

// A stored matrix as Python hands it over: format, rows, columns, codes, scales, zeros, global_scale.
QuantizedMatrix matrix_of(Arguments& arguments, const nb::tuple& parts, bool written) {
  if (parts.size() != 7) throw Error("[heddle] a quantised matrix must be a tuple of 7 items");
  const auto view = [&](int i, const char* name) {
    return written ? arguments.write(parts[i], name) : arguments.read(parts[i], name);
  };
  QuantizedMatrix m;
  std::string format;
  if (!nb::try_cast(parts[0], format)) throw Error("[lowbit] format is no string: it must be a format's name");
  if (!nb::try_cast(parts[1], m.rows) || !nb::try_cast(parts[2], m.columns)) {
    throw Error("[lowbit] shape is no pair of 64-bit integers: it must be (N, K)");
  }
  m.format = lowbit::format_named(format);
  const bool e4m3_codes = m.format.element == lowbit::Element::e4m3;
  const bool e4m3_scales = m.format.scale == lowbit::ScaleType::e4m3;
  m.codes = as_stored(view(3, "codes"), e4m3_codes ? DType::f8e4m3 : DType::u8);
  m.scales = as_stored(view(4, "scales"), e4m3_scales ? DType::f8e4m3 : DType::u8);
  m.zeros = view(5, "zeros");
  m.global_scale = view(6, "global_scale");
  return m;
}

void quantize(nb::handle weights, const nb::tuple& out, const std::string& rule, nb::handle importance,
              float global_scale) {
  Arguments arguments("quantize");
  const TensorView from = arguments.read(weights, "weights");
  const QuantizedMatrix to = matrix_of(arguments, out, true);
  lowbit::QuantizeOptions options;
  options.rule = lowbit::rule_named(rule);
  options.importance = arguments.read(importance, "importance");
  options.global_scale = global_scale;
  nb::gil_scoped_release released;
  lowbit::quantize(from, options, to);
}

void dequantize(const nb::tuple& matrix, nb::handle out) {
  Arguments arguments("dequantize");
  const QuantizedMatrix from = matrix_of(arguments, matrix, false);
  const TensorView to = arguments.write(out, "out");
  nb::gil_scoped_release released;
  lowbit::dequantize(from, to);
}

// (sqnr, mean, max, max_row, max_column)
nb::tuple error(nb::handle weights, const nb::tuple& matrix, nb::handle row_sqnr, nb::handle row_max) {
  Arguments arguments("quantization_error");
  const TensorView from = arguments.read(weights, "weights");
  const QuantizedMatrix stored = matrix_of(arguments, matrix, false);
  const TensorView sqnr = arguments.write(row_sqnr, "row_sqnr"), largest = arguments.write(row_max, "row_max");
  lowbit::QuantizationError found;
  {
    nb::gil_scoped_release released;
    const Scratch scratch(lowbit::quantization_error_workspace(from.shape[0]));  // checked to be the matrix's
    found = lowbit::quantization_error(from, stored, sqnr, largest, scratch);
  }
  return nb::make_tuple(found.sqnr, found.mean, found.max, found.max_row, found.max_column);
}

}  // namespace

void bind_lowbit(nb::module_& module) {
  module.def("lowbit_formats", &lowbit::format_names);
  module.def("lowbit_storage", &storage, nb::arg("format"), nb::arg("rows"), nb::arg("columns"));
  module.def("lowbit_quantize", &quantize, nb::arg("weights").none(), nb::arg("out"), nb::arg("rule"),
             nb::arg("importance").none(), nb::arg("global_scale"));
  module.def("lowbit_dequantize", &dequantize, nb::arg("matrix"), nb::arg("out").none());
  module.def("lowbit_error", &error, nb::arg("weights").none(), nb::arg("matrix"), nb::arg("row_sqnr").none(),
             nb::arg("row_max").none());
}

}  // namespace heddle::python
