// What all ranks must say alike before they exchange anything.
#pragma once

#include <vector>

#include "core/check.h"
#include "heddle/distributed.h"

namespace heddle::distributed {

class Agreement {
 public:
  enum class Shown : std::uint8_t { number, digest, f32 };  // f32: by its bits
  struct Word {
    const char* what;
    std::int64_t value;
    Shown as = Shown::number;
  };

  explicit Agreement(Communicator& communicator) : communicator_(communicator) {}

  // Compares with all ranks what was not compared before, as many words on each. Throws Error, with what differs, on
  // every rank.
  void require(const std::vector<Word>& words);

 private:
  Communicator& communicator_;
  std::vector<std::vector<std::int64_t>> agreed_;
};

}  // namespace heddle::distributed
