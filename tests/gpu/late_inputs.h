// Inputs that the grid before a call writes when the call may have been started already (programmatic dependent
// launch).
#pragma once

#include <cstddef>
#include <vector>

#include "heddle/tensor.h"
#include "kit/device_mirror.h"

namespace heddle::kit {

class LateInputs {
 public:
  static constexpr std::size_t kMost = 12;

  // What the tensor's memory holds now comes late; `before`: what each of its bytes is until then. A tensor that is not
  // given is passed over.
  void add(const TensorView& tensor, int before = 0xFF);
  // Puts on the stream what sets the bytes, and then one grid that lets the next one start, waits a while and writes.
  void start(const DeviceStream& stream) const;

 private:
  struct Late {
    std::byte* to;
    DeviceMemory from;
    int before;
  };
  std::vector<Late> late_;
};

}  // namespace heddle::kit
