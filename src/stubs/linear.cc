// Linear layers in a build without a matrix library.
#include "model/linear.h"

#include "heddle/error.h"

namespace heddle {

struct FloatLinear::Impl {};

FloatLinear::FloatLinear(const float*, const float*, std::int64_t, std::int64_t, DType, DType) {
  throw RuntimeError(
      "[encoder] this heddle was built without oneDNN, which linear layers need: build it with HEDDLE_ONEDNN=ON");
}
FloatLinear::FloatLinear(FloatLinear&&) noexcept = default;
FloatLinear& FloatLinear::operator=(FloatLinear&&) noexcept = default;
FloatLinear::~FloatLinear() = default;
std::size_t FloatLinear::weight_bytes() const { return 0; }
std::size_t FloatLinear::scratch_bytes() const { return 0; }
void FloatLinear::run(const void*, void*, std::int64_t, void*) const {}

}  // namespace heddle
