// x86 with AVX-512 and AVX512_BF16 (Cooper Lake, 2020; Zen 4, 2022, and later).
#include <hwy/detect_targets.h>
#if HWY_ARCH_X86 && !defined(HEDDLE_WITHOUT_AVX512_BF16)
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#define HEDDLE_TARGET avx512_bf16
#define HEDDLE_TARGET_NAME "avx512_bf16"
#define HEDDLE_TARGET_UNITS "cpu/units/avx512_bf16-inl.h"
#define HEDDLE_F32_RATE 95e9
#define HEDDLE_BF16_RATE 170e9
// Highway 1.0.3 has no target with AVX512_BF16: its AVX-512 one, widened.
#include <hwy/highway.h>
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16,avx512vnni"
#include "cpu/target-inl.h"
#endif
