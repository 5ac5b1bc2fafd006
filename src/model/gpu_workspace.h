// The workspace of a call on a GPU: rows between products, and what the operations take.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/places.h"

namespace heddle {

// Where they lie, of one layer after the other.
struct GpuRowPlaces {
  std::size_t x = 0;                           // [total, hidden]: the residual stream
  std::size_t qkv = 0, context = 0;            // [total, qkv], [total, hidden]: attention's operands and output
  std::size_t activated = 0;                   // [total, intermediate], where those two were
  std::size_t scratch = 0, scratch_bytes = 0;  // of attention and linear layers

  GpuRowPlaces(const RowSizes& sizes, std::size_t scratch_of_operations, GpuPlaces& places)
      : scratch_bytes(scratch_of_operations) {
    const auto bytes = [&](std::int64_t columns) {
      return static_cast<std::size_t>(sizes.total) * static_cast<std::size_t>(columns) * sizes.element;
    };
    x = places.take(bytes(sizes.hidden));
    GpuPlaces attention = places, feed_forward = places;
    qkv = attention.take(bytes(sizes.qkv));
    context = attention.take(bytes(sizes.hidden));
    activated = feed_forward.take(bytes(sizes.intermediate));
    places = attention.bytes() > feed_forward.bytes() ? attention : feed_forward;
    scratch = places.take(scratch_bytes);
  }
};

}  // namespace heddle
