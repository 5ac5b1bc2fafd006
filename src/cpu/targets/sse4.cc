// x86 with SSE4.2 (Nehalem, 2008, and later).
#include <hwy/detect_targets.h>
#if HWY_ARCH_X86 && !defined(HEDDLE_WITHOUT_SSE4)
#undef HWY_TARGET
#define HWY_TARGET HWY_SSE4
#define HEDDLE_TARGET sse4
#define HEDDLE_TARGET_NAME "sse4"
#define HEDDLE_TARGET_UNITS "cpu/units/plain-inl.h"
#define HEDDLE_F32_RATE 20e9
#define HEDDLE_BF16_RATE 20e9
#include "cpu/target-inl.h"
#endif
