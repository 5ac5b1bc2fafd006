// Errors that Heddle throws. Every message names the operation, the tensor, the value found and the rule it breaks.
#pragma once

#include <stdexcept>
#include <string>

namespace heddle {

// A bad argument: shape, dtype, stride, index data or option. Nothing has been written when it is thrown.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Something outside the arguments failed: a file, a device, a missing backend.
class RuntimeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace heddle
