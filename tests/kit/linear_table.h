// The table of linear layers: every format with every number of rows and dtype, activations, layouts and sizes in turn.
#pragma once

#include <string>
#include <vector>

#include "kit/linear_layer.h"

namespace heddle::kit {

inline constexpr Activation kActivations[] = {Activation::none,      Activation::relu, Activation::gelu_erf,
                                              Activation::gelu_tanh, Activation::silu, Activation::swiglu};
inline constexpr Norm kNorms[] = {Norm::none, Norm::layer_norm, Norm::rms_norm};
inline constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};

// Of the backward's table, and those that the forward's has besides.
inline const std::vector<std::string> kBackwardFormats = {"nvfp4",        "mxfp4",    "nf4",       "nf4_b256",
                                                          "fp4_bnb",      "int4_g32", "int4_g128", "int4_g32_zp",
                                                          "int4_g128_zp", "int8_row", "fp8_row",   "e2m1_row"};
inline const std::vector<std::string> kForwardFormats = {"int4_g64", "int4_g64_zp"};

struct NamedLinearCase {
  std::string name;
  LinearCase spec;
};
// Of one format.
std::vector<NamedLinearCase> linear_forward_cases(const std::string& format);
std::vector<NamedLinearCase> linear_backward_cases(const std::string& format);

}  // namespace heddle::kit
