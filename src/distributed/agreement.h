// What all ranks must say alike before they exchange anything.
#pragma once

#include <utility>
#include <vector>

#include "core/check.h"
#include "heddle/distributed.h"

namespace heddle::distributed {

class Agreement {
 public:
  using Words = std::vector<std::pair<const char*, std::int64_t>>;  // what, and its value

  explicit Agreement(Communicator& communicator) : communicator_(communicator) {}

  // Compares with all ranks what was not compared before, as many words on each. Throws Error, with what differs, on
  // every rank.
  void require(const Words& words);

 private:
  Communicator& communicator_;
  std::vector<std::vector<std::int64_t>> agreed_;
};

}  // namespace heddle::distributed
