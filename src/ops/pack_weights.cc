// Packing of quantised weights: check everything, then write.
#include <cmath>
#include <cstring>

#include "core/overlap.h"
#include "heddle/linear.h"
#include "lowbit/formats.h"
#include "lowbit/packed.h"
#include "ops/linear_arguments.h"
#include "ops/lowbit_arguments.h"

namespace heddle {
namespace {

using lowbit::Matrix;

// Kernels fill rows and columns up with zeros, which a NaN elsewhere in a vector must not touch.
void check_finite(const Check& check, const Matrix& m) {
  if (m.format.global_scale) {
    check.require(std::isfinite(*m.global_scale), "matrix.global_scale is ", *m.global_scale, ": it must be finite");
  }
  const float global = m.format.global_scale ? *m.global_scale : 1.0f;
  for (std::int64_t i = 0; i < m.N * m.groups; ++i) {
    const float scale = lowbit::load_scale(m.scales, m.format.scale, i) * global;
    check.require(std::isfinite(scale), "matrix.scales[", i / m.groups, ", ", i % m.groups, "] is ", scale,
                  m.format.global_scale ? " with the global scale" : "", ": it must be finite");
  }
  if (m.format.element != lowbit::Element::e4m3) return;
  for (std::int64_t i = 0; i < m.N * m.K; ++i) {
    check.require((m.codes[i] & 0x7f) != 0x7f, "matrix.codes[", i / m.K, ", ", i % m.K, "] is nan: it must be finite");
  }
}

}  // namespace

PackedWeights packed_storage(const lowbit::Format& format, std::int64_t rows, std::int64_t columns, bool gated) {
  lowbit::storage(format, rows, columns);  // throws if there is no such matrix
  Check("packed_storage")
      .require(!gated || rows % 2 == 0, "rows is ", rows, ": gated weights have a gate and an up row of each output, ",
               "so an even number");
  PackedWeights packed;
  packed.format = format;
  packed.rows = rows;
  packed.columns = columns;
  packed.gated = gated;
  packed.data = TensorView(nullptr, DType::u8, {lowbit::panel_layout(format, rows, columns).bytes()});
  return packed;
}

void pack_weights(const lowbit::QuantizedMatrix& matrix, const PackedWeights& out, const Runtime& runtime) {
  const Check check("pack_weights");
  const Matrix from = lowbit::checked_matrix(check, matrix, "matrix");
  check.require(out.format == matrix.format && out.rows == matrix.rows && out.columns == matrix.columns,
                "out is for another matrix: its format, rows and columns must be matrix's");
  const lowbit::Panels panels = checked_panels(check, out, "out");
  for (const TensorView* view : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
    check.require(!view->given() || !may_share_memory(out.data, *view), "out.data shares memory with matrix");
  }
  check_finite(check, from);
  auto* to = static_cast<std::uint8_t*>(out.data.data);
  const float global = from.format.global_scale ? *from.global_scale : 1.0f;
  std::memset(to, 0, lowbit::PanelLayout::kHeader);
  std::memcpy(to, &global, sizeof global);
  Executor& executor = runtime.executor != nullptr ? *runtime.executor : default_executor();
  executor.parallel_for(panels.layout.panels, [&](std::int64_t index, int) {
    lowbit::pack_panel(from, panels.layout, index,
                       to + lowbit::PanelLayout::kHeader + index * panels.layout.panel_bytes);
  });
}

}  // namespace heddle
