#include "core/check.h"

#include <array>
#include <bit>
#include <utility>

namespace heddle {

void Check::tensor(const TensorView& view, const char* name, DType dtype, Device device, int rank,
                   const char* first) const {
  require(view.given(), name, " is missing");
  require(view.rank == rank, name, " has ", view.rank, " dimensions: it must have ", rank, "; found ", name, " ", view);
  require(view.dtype == dtype, name, " is ", name_of(view.dtype), ": it must be ", name_of(dtype));
  require(view.device == device, name, " is on another device than ", first);
  addressable(view, name);
}

void Check::addressable(const TensorView& view, const char* name) const {
  require(view.rank >= 0 && view.rank <= kMaxRank, name, " has ", view.rank, " dimensions: at most ", kMaxRank,
          " are supported");
  // Sum of |stride| * (extent - 1) bounds every element offset; it must fit with room for the element size.
  constexpr std::int64_t kLimit = std::int64_t{1} << 58;
  bool empty = false;
  __int128 reach = 0;
  for (int i = 0; i < view.rank; ++i) {
    require(view.shape[i] >= 0, name, " has extent ", view.shape[i], " in dimension ", i, ": extents are at least 0");
    empty |= view.shape[i] == 0;
    const __int128 stride = view.stride[i] < 0 ? -static_cast<__int128>(view.stride[i]) : view.stride[i];
    if (view.shape[i] > 0) reach += stride * (view.shape[i] - 1);
    require(reach <= kLimit, name, " spans more than 2^58 elements: stride ", view.stride[i], " in dimension ", i,
            " is too large; found ", name, " ", view);
  }
  const bool absent = !empty && view.given() && view.data == nullptr;
  require(!absent || data_ == Data::to_come, name, " has no data: its pointer is null; found ", name, " ", view);
  require(!absent || (view.alignment > 0 && std::has_single_bit(static_cast<unsigned>(view.alignment))), name,
          " has no data yet and alignment ", view.alignment, ": it must be a power of two");
}

void Check::readable_indices(const TensorView& view, const char* name) const {
  require(view.device != Device::cpu || view.data != nullptr || view.elements() == 0, name,
          " has no data: index data on the CPU is read in questions too");
}

void Check::not_overlapping(const TensorView& view, const char* name) const {
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxRank> axes{};  // |stride|, extent; sorted below
  int count = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return;
    if (view.shape[i] > 1) axes[count++] = {view.stride[i] < 0 ? -view.stride[i] : view.stride[i], view.shape[i]};
  }
  for (int i = 1; i < count; ++i) {
    for (int j = i; j > 0 && axes[j] < axes[j - 1]; --j) std::swap(axes[j], axes[j - 1]);
  }
  std::int64_t reach = 1;  // elements that the smaller axes span
  for (int i = 0; i < count; ++i) {
    require(axes[i].first >= reach, name, " is an output whose elements overlap: stride ", axes[i].first,
            " is smaller than the ", reach, " elements inside it; found ", name, " ", view);
    reach += axes[i].first * (axes[i].second - 1);
  }
}

int alignment_of(const TensorView& view) {
  constexpr std::uintptr_t kMost = 256;
  const auto address =
      view.data != nullptr ? reinterpret_cast<std::uintptr_t>(view.data) : static_cast<std::uintptr_t>(view.alignment);
  return 1 << std::countr_zero(address | kMost);
}

}  // namespace heddle
