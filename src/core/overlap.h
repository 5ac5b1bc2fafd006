// Do two views share memory? Asked of an output and the tensors that are read beside it.
#pragma once

#include "heddle/tensor.h"

namespace heddle {

// True if some element of `a` may share bytes with some element of `b`. Exact for views of one dtype with the same
// strides, such as slices of one fused tensor, if the elements of `a` are apart from each other; for other views the
// byte ranges decide. Views without data share none.
bool may_share_memory(const TensorView& a, const TensorView& b);

}  // namespace heddle
