// x86 with AVX2 and FMA (Haswell, 2013; Zen, 2017, and later).
#include <hwy/detect_targets.h>
#if HWY_ARCH_X86 && !defined(HEDDLE_WITHOUT_AVX2)
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX2
#define HEDDLE_TARGET avx2
#define HEDDLE_TARGET_NAME "avx2"
#define HEDDLE_TARGET_UNITS "cpu/units/plain-inl.h"
#define HEDDLE_F32_RATE 75e9
#define HEDDLE_BF16_RATE 70e9
#include "cpu/target-inl.h"
#endif
