// Highway's emulation of 128-bit vectors in plain C++: slow, and an independent check of every other target.
#ifdef HEDDLE_EMU128
#include <hwy/detect_targets.h>
#undef HWY_TARGET
#define HWY_TARGET HWY_EMU128
#define HEDDLE_TARGET emu128
#define HEDDLE_TARGET_NAME "emu128"
#define HEDDLE_TARGET_UNITS "cpu/units/plain-inl.h"
#define HEDDLE_F32_RATE 2e9
#define HEDDLE_BF16_RATE 2e9
#include "cpu/target-inl.h"
#endif
