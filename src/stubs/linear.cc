// Linear layers in a build without a matrix library.
#include "model/linear.h"

#include "heddle/error.h"

namespace heddle {

struct FloatLinear::Impl {};

FloatLinear::FloatLinear(const float*, const float*, std::int64_t, std::int64_t, DType, DType) {
  (void)matrix_library();
}
FloatLinear::FloatLinear(FloatLinear&&) noexcept = default;
FloatLinear& FloatLinear::operator=(FloatLinear&&) noexcept = default;
FloatLinear::~FloatLinear() = default;
std::size_t FloatLinear::weight_bytes() const { return 0; }
std::size_t FloatLinear::scratch_bytes() const { return 0; }
void FloatLinear::run(const void*, void*, std::int64_t, void*) const {}

std::string matrix_library() {
  throw RuntimeError(
      "[linear] float32 and bfloat16 layers on the CPU need oneDNN, and this heddle was built without: build it with "
      "HEDDLE_ONEDNN=ON; attention, layers in 8 and 4 bits and GPUs do without");
}

}  // namespace heddle
