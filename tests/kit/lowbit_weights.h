// Weights and storage for tests of quantisation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "heddle/lowbit.h"
#include "kit/host_tensor.h"

namespace heddle::kit {

// gaussian, student (5 degrees of freedom) and uniform draw each weight alone. ties: code values and the points halfway
// between them, under scales that are powers of two. signs: zeros of both signs and rows of zeros. outliers: one weight
// in 40 is 1000 times larger. tiny: subnormal numbers. huge: up to the largest number that the dtype and f16 scales
// take.
enum class Draw : std::uint8_t { gaussian, student, uniform, ties, signs, outliers, tiny, huge };

HostTensor draw_weights(Draw draw, DType dtype, std::int64_t rows, std::int64_t columns, lowbit::Element element,
                        std::uint32_t seed, Layout layout = Layout::contiguous);

// Owns plain storage; 64 bytes around each tensor must stay as they are.
class QuantizedMemory {
 public:
  QuantizedMemory(const lowbit::Format& format, std::int64_t rows, std::int64_t columns);

  const lowbit::QuantizedMatrix& matrix() const { return matrix_; }
  lowbit::QuantizedMatrix& matrix() { return matrix_; }
  bool guards_intact() const;
  bool untouched() const;
  // Empty if all tensors have the same bytes; else which one differs, and where.
  std::string difference(const QuantizedMemory& other) const;

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::byte kPoison{0xA5};
  struct Block {
    const char* name;
    std::vector<std::byte> bytes;
  };
  std::vector<Block> blocks_;
  lowbit::QuantizedMatrix matrix_;
};

// What the reference makes of weights, and what that decodes to.
struct QuantizedByReference {
  QuantizedByReference(const HostTensor& weights, const lowbit::QuantizeOptions& options, const lowbit::Format& format);

  // Quantises the same with the target in use, and dequantises to every dtype. Empty if all bytes and values are the
  // reference's; else the first that is not.
  std::string difference(const HostTensor& weights, const lowbit::QuantizeOptions& options) const;

  QuantizedMemory memory;
  std::vector<float> values;  // [N, K]
};

// Rules that the format has.
std::vector<lowbit::ScaleRule> rules_of(const lowbit::Format& format);

}  // namespace heddle::kit
