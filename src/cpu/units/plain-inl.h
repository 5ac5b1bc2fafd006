// The units of a target that has none for bf16 or for bytes.
#pragma once

#include "cpu/units/bytes-inl.h"
#include "cpu/units/f32-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

using Bf16Unit = F32Unit;
using ByteUnit = Int16Bytes;

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
