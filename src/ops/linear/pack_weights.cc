// Packing of quantised weights: check everything, then write.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/overlap.h"
#include "core/parallel.h"
#include "core/runtime.h"
#include "heddle/linear.h"
#include "lowbit/formats.h"
#include "lowbit/fragments.h"
#include "lowbit/packed.h"
#include "lowbit/packing_error.h"
#include "ops/linear/arguments.h"
#include "ops/lowbit/arguments.h"

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

// Kernels take 128 + zero for a bfloat16.
void check_zeros(const Check& check, const Matrix& m) {
  for (std::int64_t i = 0; i < m.N * m.groups; ++i) {
    check.require(m.zeros[i] <= lowbit::kMostZero, "matrix.zeros[", i / m.groups, ", ", i % m.groups, "] is ",
                  static_cast<int>(m.zeros[i]), ": order fragments16 has zero points to ", lowbit::kMostZero);
  }
}

// Blocks of nvfp4 have no room for a scale's sign, that of a zero neither.
void check_signs(const Check& check, const Matrix& m, WeightOrder order) {
  for (std::int64_t i = 0; i < m.N * m.groups; ++i) {
    check.require(static_cast<const std::uint8_t*>(m.scales)[i] < 0x80, "matrix.scales[", i / m.groups, ", ",
                  i % m.groups, "] is ", lowbit::load_scale(m.scales, m.format.scale, i), ": order ", name_of(order),
                  " has no negative scales");
  }
}

void refuse_changes(const Check& check, const Matrix& m, WeightOrder order, const PackingError& found) {
  check.require(false, "matrix[", found.max_row, ", ", found.max_column, "] is ",
                lowbit::weight_of(m, found.max_row, found.max_column), ": order ", name_of(order),
                " would change it by ", found.max, " of itself, and ", found.changed, " of ", m.N * m.K,
                " weights in all: with exact set it may change none");
}

void pack_panels(const Matrix& from, const PackedWeights& out, Executor& executor) {
  const lowbit::Panels panels = panels_of(out);
  auto* to = static_cast<std::uint8_t*>(out.data.data);
  const float global = from.format.global_scale ? *from.global_scale : 1.0f;
  std::memset(to, 0, lowbit::PanelLayout::kHeader);
  std::memcpy(to, &global, sizeof global);
  parallel_for(executor, panels.layout.panels, [&](std::int64_t index, int) {
    lowbit::pack_panel(from, panels.layout, index,
                       to + lowbit::PanelLayout::kHeader + index * panels.layout.panel_bytes);
  });
}

void pack_fragments(const Matrix& from, const PackedWeights& out, Executor& executor) {
  const lowbit::FragmentLayout layout = lowbit::fragment_layout(out.format, out.order, out.rows, out.columns);
  auto* const data = static_cast<std::byte*>(out.data.data);
  auto* const scales = reinterpret_cast<float*>(data);
  std::memset(data, 0, static_cast<std::size_t>(layout.blocks));
  if (out.order == WeightOrder::fragments8) {
    if (lowbit::has_scaled_blocks(out.format)) {
      pack(from, out.gated, reinterpret_cast<lowbit::ScaledBlock8*>(data + layout.blocks), scales, executor);
    } else {
      pack(from, out.gated, reinterpret_cast<lowbit::FragmentBlock8*>(data + layout.blocks), scales, executor);
    }
  } else if (!lowbit::is_e2m1(out.format)) {
    pack_codes(from, out.gated, data + layout.blocks, scales, executor);
  } else {
    pack(from, out.gated, reinterpret_cast<lowbit::FragmentBlock*>(data + layout.blocks), scales, executor);
  }
}

void pack_matrix(const Matrix& from, const PackedWeights& out, Executor& executor) {
  constexpr std::int64_t kRows = 64;  // of a task
  const lowbit::MatrixLayout layout = lowbit::matrix_layout(out.format, out.rows, out.columns);
  auto* const data = static_cast<std::byte*>(out.data.data);
  const float global = from.format.global_scale ? *from.global_scale : 1.0f;
  std::memset(data, 0, static_cast<std::size_t>(layout.codes));
  std::memcpy(data, &global, sizeof global);
  parallel_for(executor, (layout.rows + kRows - 1) / kRows, [&](std::int64_t task, int) {
    lowbit::pack_matrix_rows(from, task * kRows, std::min(layout.rows, (task + 1) * kRows), data);
  });
}

std::int64_t packed_bytes(const lowbit::Format& format, std::int64_t rows, std::int64_t columns, WeightOrder order) {
  switch (order) {
    case WeightOrder::rows16:
      return lowbit::panel_layout(format, rows, columns).bytes();
    case WeightOrder::matrix:
    case WeightOrder::matrix8:
      return lowbit::matrix_layout(format, rows, columns).bytes;
    default:
      return lowbit::fragment_layout(format, order, rows, columns).bytes;
  }
}

bool has_order(const lowbit::Format& format, WeightOrder order) {
  if (order == WeightOrder::matrix8) return format.element == lowbit::Element::e4m3;
  return order != WeightOrder::fragments8 || lowbit::is_e2m1(format);
}

}  // namespace

PackedWeights packed_storage(const lowbit::Format& format, std::int64_t rows, std::int64_t columns, bool gated,
                             WeightOrder order) {
  const Check check("packed_storage");
  check.require(order != WeightOrder::dense, "order is dense: it has no low-bit storage; dense_weights() views W");
  lowbit::storage(format, rows, columns);  // throws if there is no such matrix
  check.require(!gated || rows % 2 == 0, "rows is ", rows, ": gated weights have a gate and an up row of each output, ",
                "so an even number");
  check.require(has_order(format, order), "format is ", lowbit::name_of(format), ": order ", name_of(order), " has ",
                order == WeightOrder::matrix8 ? "fp8_row" : "nvfp4, mxfp4 and e2m1_row");
  PackedWeights packed;
  packed.format = format;
  packed.rows = rows;
  packed.columns = columns;
  packed.gated = gated;
  packed.order = order;
  packed.data = TensorView(nullptr, DType::u8, {packed_bytes(format, rows, columns, order)});
  return packed;
}

PackedWeights dense_weights(const TensorView& weights, bool gated) {
  const Check check("dense_weights", Data::to_come);  // the calls that read them ask for their data
  check.require(weights.given(), "weights is missing");
  check.require(weights.rank == 2, "weights is ", weights, ": it must be [N, K]");
  check.require(weights.device == Device::cuda, "weights is on the CPU: order dense is for GPUs");
  PackedWeights dense;
  dense.rows = weights.shape[0];
  dense.columns = weights.shape[1];
  dense.gated = gated;
  dense.device = Device::cuda;
  dense.order = WeightOrder::dense;
  dense.kept = weights;
  check_kept(check, dense, "weights");
  check_packed(check, dense, "weights");
  return dense;
}

PackingError pack_weights(const lowbit::QuantizedMatrix& matrix, const PackedWeights& out, const PackOptions& options,
                          const Runtime& runtime) {
  const Check check("pack_weights");
  check.require(out.order != WeightOrder::dense, "out is in order dense: its weights are not quantised");
  const Matrix from = lowbit::checked_matrix(check, matrix, "matrix");
  check.require(out.format == matrix.format && out.rows == matrix.rows && out.columns == matrix.columns,
                "out is for another matrix: its format, rows and columns must be matrix's");
  check_packed(check, out, "out");
  check.require(out.device == Device::cpu, "out is on a GPU: weights are packed on the CPU and copied");
  for (const TensorView* view : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
    check.require(!view->given() || !may_share_memory(out.data, *view), "out.data shares memory with matrix");
  }
  check_finite(check, from);
  if (out.order == WeightOrder::fragments16 && from.zeros != nullptr) check_zeros(check, from);
  const bool fragments = out.order == WeightOrder::fragments16 || out.order == WeightOrder::fragments8;
  if (fragments && from.format.scale == lowbit::ScaleType::e4m3) check_signs(check, from, out.order);
  Executor& executor = executor_of(runtime);
  const PackingError found = lowbit::packing_error(from, out.order, executor);
  if (options.exact && found.changed > 0) refuse_changes(check, from, out.order, found);
  const bool in_matrix = out.order == WeightOrder::matrix || out.order == WeightOrder::matrix8;
  (out.order == WeightOrder::rows16 ? pack_panels : in_matrix ? pack_matrix : pack_fragments)(from, out, executor);
  return found;
}

}  // namespace heddle
