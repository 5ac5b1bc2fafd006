// A case whose rows or keys stand for several positions, and the mask that says the same.
#pragma once

#include "kit/case_data.h"

namespace heddle::kit {

// The same tensors under a mask [B, H, Sq, Sk], true where a row meets a key, in place of steps, offsets, causality and
// window.
CaseData under_mask(const CaseData& stepped);

}  // namespace heddle::kit
