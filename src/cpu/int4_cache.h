// The CPU's candidate for appends to the cache in 4 bits.
#pragma once

#include "problem/int4_append.h"

namespace heddle::cpu {

extern const Int4AppendKernel kInt4CacheAppend;  // "cpu"

}  // namespace heddle::cpu
