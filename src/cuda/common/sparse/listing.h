// What the list of a position has without a choice.
#pragma once

namespace heddle::cuda::sparse {

struct Listing {
  int seen, touched;  // pooled keys, and blocks that these touch: the first ones
  int forced[3], taken;
};

}  // namespace heddle::cuda::sparse
