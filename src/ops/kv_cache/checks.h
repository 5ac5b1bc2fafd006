// What rotary embedding and appends to a cache check alike.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "heddle/kv_cache.h"
#include "problem/operand_of.h"

namespace heddle {

// The first tensor of a call: all others are on its device.
struct First {
  const char* name;
  Device device;
  // Whether index data may be read here: on a GPU it is not, because that would wait for the stream.
  bool readable() const { return device == Device::cpu; }
};

// A rank 4 tensor of a floating-point dtype (for a cache also f8e4m3).
void check_data(const Check& check, const TensorView& view, const char* name, const char* layout, const First& first,
                bool narrow = false);
// int32 [count], contiguous.
const std::int32_t* check_indices(const Check& check, const TensorView& view, const char* name, std::int64_t count,
                                  const First& first);
void check_apart(const Check& check, const TensorView& written, const char* written_name, const TensorView& read,
                 const char* read_name);
// `data` is what is rotated, [.., D].
RotaryTables check_rotary(const Check& check, const Rotary& rotary, const TensorView& data, const First& first);

}  // namespace heddle
