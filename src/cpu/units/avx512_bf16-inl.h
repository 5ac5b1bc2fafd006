// The units of AVX512_BF16; all processors that have it have VNNI.
#pragma once

#include "cpu/units/bf16_pairs-inl.h"
#include "cpu/units/f32-inl.h"
#include "cpu/units/vnni-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

using Bf16Unit = Bf16PairUnit;
using ByteUnit = VnniBytes;

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
