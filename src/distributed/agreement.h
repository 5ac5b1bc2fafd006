// What all ranks must say alike before they exchange anything.
#pragma once

#include <vector>

#include "distributed/named.h"

namespace heddle::distributed {

std::string digest_text(std::uint64_t digest);

class Agreement {
 public:
  enum class Shown : std::uint8_t { number, digest, f32 };  // f32: by its bits
  struct Word {
    const char* what;
    std::int64_t value;
    Shown as = Shown::number;
  };

  explicit Agreement(Named& communicator) : communicator_(communicator) {}

  // Compares with all ranks what was not compared before, as many words on each. Throws Error, with what differs, on
  // every rank.
  void require(const std::vector<Word>& words);

 private:
  Named& communicator_;
  std::vector<std::vector<std::int64_t>> agreed_;
};

}  // namespace heddle::distributed
