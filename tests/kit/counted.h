// What a rank sends, counted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "heddle/distributed.h"

namespace heddle::kit {

// But for what ranks compare before.
class Counted : public distributed::Communicator {
 public:
  explicit Counted(distributed::Communicator& all) : all_(all) {}
  int rank() const override { return all_.rank(); }
  int size() const override { return all_.size(); }
  const char* name() const override { return all_.name(); }
  std::unique_ptr<distributed::Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in,
                                                  int from, const distributed::Purpose& purpose) override {
    if (purpose.exchange != "plans compared" && !out.empty()) {
      bytes += static_cast<std::int64_t>(out.size());
      ++messages;
    }
    return all_.exchange(out, to, in, from, purpose);
  }

  std::int64_t bytes = 0, messages = 0;

 private:
  distributed::Communicator& all_;
};

}  // namespace heddle::kit
