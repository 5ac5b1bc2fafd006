// Linear layers in a build without a matrix library.
#include "model/linear.h"

#include "heddle/error.h"

namespace heddle {

struct Linear::Impl {};

Linear::Linear(const float*, const float*, std::int64_t, std::int64_t, DType, DType) {
  throw RuntimeError(
      "[encoder] this heddle was built without oneDNN, which linear layers need: build it with HEDDLE_ONEDNN=ON");
}
Linear::Linear(Linear&&) noexcept = default;
Linear& Linear::operator=(Linear&&) noexcept = default;
Linear::~Linear() = default;
std::size_t Linear::weight_bytes() const { return 0; }
std::size_t Linear::scratch_bytes() const { return 0; }
void Linear::run(const void*, void*, std::int64_t, void*) const {}

}  // namespace heddle
