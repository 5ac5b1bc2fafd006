// What the rest of the library asks about the GPU side as a whole.
#pragma once

namespace heddle::cuda {

// Whether this build has the GPU kernels. Whether there is a GPU to run them is another question.
bool built();

}  // namespace heddle::cuda
