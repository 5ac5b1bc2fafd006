// Some ranks of a communicator as one of its own.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "heddle/distributed.h"

namespace heddle::distributed {

// Rank n here is members[n] there; this rank is among them. Errors name ranks as they are there. What two ranks
// exchange here and there keeps one order.
class Subset : public Communicator {
 public:
  Subset(Communicator& all, std::vector<int> members)
      : all_(all),
        members_(std::move(members)),
        rank_(static_cast<int>(std::ranges::find(members_, all.rank()) - members_.begin())) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  const char* name() const override { return all_.name(); }
  Device device() const override { return all_.device(); }
  void use_stream(void* stream) override { all_.use_stream(stream); }
  void* stream() const override { return all_.stream(); }
  void throw_if_failed() override { all_.throw_if_failed(); }
  std::unique_ptr<Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in, int from,
                                     const Purpose& purpose) override {
    return all_.exchange(out, members_[static_cast<std::size_t>(to)], in, members_[static_cast<std::size_t>(from)],
                         purpose);
  }

 private:
  Communicator& all_;
  const std::vector<int> members_;
  const int rank_;
};

}  // namespace heddle::distributed
