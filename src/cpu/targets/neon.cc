// Arm with NEON (AArch64).
#include <hwy/detect_targets.h>
#if HWY_ARCH_ARM
#undef HWY_TARGET
#define HWY_TARGET HWY_NEON
#define HEDDLE_TARGET neon
#define HEDDLE_TARGET_NAME "neon"
#define HEDDLE_TARGET_UNITS "cpu/units/plain-inl.h"
#define HEDDLE_F32_RATE 40e9
#define HEDDLE_BF16_RATE 35e9
#include "cpu/target-inl.h"
#endif
