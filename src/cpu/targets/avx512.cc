// x86 with AVX-512 F, VL, DQ, BW (Skylake-X, 2017; Zen 4, 2022, and later).
#include <hwy/detect_targets.h>
#if HWY_ARCH_X86 && !defined(HEDDLE_WITHOUT_AVX512)
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#define HEDDLE_TARGET avx512
#define HEDDLE_TARGET_NAME "avx512"
#define HEDDLE_TARGET_UNITS "cpu/units/plain-inl.h"
#define HEDDLE_F32_RATE 95e9
#define HEDDLE_BF16_RATE 90e9
#include "cpu/target-inl.h"
#endif
