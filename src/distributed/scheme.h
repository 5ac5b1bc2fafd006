// The schemes, as a rank runs them.
#pragma once

#include <memory>
#include <span>

#include "distributed/arguments.h"
#include "distributed/calls.h"

namespace heddle::distributed {

// One rank's share, of calls whose arguments were checked and compared. It owns memory, allocated by the first call.
class SchemeOfRank {
 public:
  virtual ~SchemeOfRank() = default;
  // Writes o and, if given, lse.
  virtual void forward(const Call& call) = 0;
  // Writes gradients.dq, if given, f32 or of q's dtype. dkv: returns the gradients of the rank's own keys, complete, as
  // call.gradients() has them, until the next call; else nothing.
  virtual std::span<float> backward(const Call& call, const RowGradients& gradients, bool dkv) = 0;
};

// gather, ring and needed: keys go to rows. Plan, communicator and memory outlive it; memory is where messages lie.
std::unique_ptr<SchemeOfRank> scheme_of_keys(const Plan& plan, Communicator& communicator, Memory& memory,
                                             Scheme scheme);
// ulysses and 2d: heads are exchanged for rows inside of a group. across: how keys get from group to group, as above.
std::unique_ptr<SchemeOfRank> scheme_of_heads(const Plan& plan, Communicator& communicator, Memory& memory,
                                              Scheme scheme, Scheme across);

}  // namespace heddle::distributed
