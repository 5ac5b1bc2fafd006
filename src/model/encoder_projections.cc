#include "model/encoder_projections.h"

#include <algorithm>
#include <utility>

namespace heddle {

EncoderProjections::EncoderProjections(FloatLinear together, DType dtype)
    : together_(std::make_unique<FloatLinear>(std::move(together))), format_(name_of(dtype)) {}

EncoderProjections::EncoderProjections(std::vector<TransformerLinear> parts) : parts_(std::move(parts)) {}

const std::string& EncoderProjections::format(int part) const {
  return together_ != nullptr ? format_ : this->part(part).format();
}

std::size_t EncoderProjections::weight_bytes(int part) const {
  if (together_ != nullptr) return together_->weight_bytes() / 3;
  return this->part(part).weight_bytes() / (parts_.size() == 1 ? 3 : 1);
}

PackingError EncoderProjections::packing_error(int part) const {
  return together_ != nullptr ? PackingError() : this->part(part).packing_error();
}

std::size_t EncoderProjections::weight_bytes() const {
  std::size_t bytes = together_ != nullptr ? together_->weight_bytes() : 0;
  for (const TransformerLinear& part : parts_) bytes += part.weight_bytes();
  return bytes;
}

std::size_t EncoderProjections::scratch_bytes() const {
  std::size_t bytes = together_ != nullptr ? together_->scratch_bytes() : 0;
  for (const TransformerLinear& part : parts_) bytes = std::max(bytes, part.scratch_bytes());
  return bytes;
}

void EncoderProjections::run(const std::byte* x, std::byte* y, std::int64_t rows, std::byte* scratch) const {
  if (together_ != nullptr) return together_->run(x, y, rows, scratch);
  const std::int64_t stride = 3 * parts_[0].shape().out;
  for (const TransformerLinear& part : parts_) {
    part.run(x, nullptr, y, stride, rows, scratch);
    y += size_of(part.shape().dtype) * static_cast<std::size_t>(part.shape().out);
  }
}

std::size_t EncoderProjections::gpu_workspace(std::int64_t rows) const {
  std::size_t bytes = 0;
  for (const TransformerLinear& part : parts_) bytes = std::max(bytes, part.gpu_workspace(rows));
  return bytes;
}

void EncoderProjections::run_on_gpu(std::byte* x, std::byte* y, std::int64_t rows, const Runtime& runtime) const {
  const std::int64_t stride = static_cast<std::int64_t>(parts_.size()) * parts_[0].shape().out;
  for (const TransformerLinear& part : parts_) {
    part.run_on_gpu({x, part.shape().in}, {}, {y, stride}, rows, runtime);
    y += size_of(part.shape().dtype) * static_cast<std::size_t>(part.shape().out);
  }
}

}  // namespace heddle
