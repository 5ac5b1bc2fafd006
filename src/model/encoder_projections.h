// The encoder's projections to queries, keys and values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "heddle/runtime.h"
#include "model/linear.h"
#include "model/transformer_linear.h"

namespace heddle {

// Queries, keys and values, beside each other in rows of 3 * hidden: as one product where all three are in the
// encoder's own precision (on a GPU: one part), else as three.
class EncoderProjections {
 public:
  EncoderProjections(FloatLinear together, DType dtype);
  explicit EncoderProjections(std::vector<TransformerLinear> parts);

  // Of part 0, 1 or 2.
  const std::string& format(int part) const;
  std::size_t weight_bytes(int part) const;
  PackingError packing_error(int part) const;
  std::size_t weight_bytes() const;
  std::size_t scratch_bytes() const;
  void run(const std::byte* x, std::byte* y, std::int64_t rows, std::byte* scratch) const;
  // On a GPU.
  std::size_t gpu_workspace(std::int64_t rows) const;
  void run_on_gpu(std::byte* x, std::byte* y, std::int64_t rows, const Runtime& runtime) const;

 private:
  const TransformerLinear& part(int index) const {
    return parts_[parts_.size() == 1 ? 0 : static_cast<std::size_t>(index)];
  }

  std::unique_ptr<FloatLinear> together_;
  std::string format_;
  std::vector<TransformerLinear> parts_;
};

}  // namespace heddle
