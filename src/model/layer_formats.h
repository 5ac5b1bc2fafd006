// Which linear layer has which precision, by rules over names, and weights quantised as a rule says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/check.h"
#include "heddle/checkpoint.h"
#include "heddle/lowbit.h"

namespace heddle {

class LayerFormats {
 public:
  LayerFormats() = default;
  // Of a model in `dtype`. Throws Error for what is neither "float32" or "bfloat16", on a GPU dtype's name alone, nor a
  // low-bit format with or without a rule for its scales.
  LayerFormats(const Check& check, std::vector<lowbit::LayerRule> rules, DType dtype, Device device);

  // What the first rule that matches says, or "".
  std::string of(const std::string& name);
  // Of what that was: whether it is none of low bits, and the dtype of products then.
  static bool is_floating(const std::string& format);
  static DType precision(const std::string& format, DType dtype);
  // Throws Error for a rule that no layer has matched; `names`: what names there are.
  void require_all_matched(const Check& check, const std::string& names) const;

 private:
  std::vector<lowbit::LayerRule> rules_;
  std::vector<bool> matched_;
};

// A matrix of low bits with memory of its own.
struct OwnedMatrix {
  lowbit::QuantizedMatrix matrix;
  std::vector<std::byte> memory[4];

  OwnedMatrix(const lowbit::Format& format, std::int64_t rows, std::int64_t columns);
};

// weight [out, in] as `format`, "int4_g64:mse", has it. Throws Error, beginning with `name`, where the format's group
// does not fit or its scales do not reach.
OwnedMatrix quantized(const Check& check, const std::string& name, const float* weight, std::int64_t out,
                      std::int64_t in, const std::string& format);

}  // namespace heddle
