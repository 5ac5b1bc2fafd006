// The CPU's candidates for rotary embedding and for appends to a cache.
#pragma once

#include "problem/kv_cache.h"

namespace heddle::cpu {

extern const RotaryKernel kRotary;         // "cpu"
extern const AppendKernel kKvCacheAppend;  // "cpu"

}  // namespace heddle::cpu
