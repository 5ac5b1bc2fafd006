// Activations of linear layers and their slopes: in double, written so that nothing cancels; and plainly, in f32 by the
// formulas that PyTorch has.
#pragma once

#include <algorithm>
#include <cmath>

#include "heddle/linear.h"

namespace heddle::kit::activations {

inline double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }
inline double silu(double z) { return z * sigmoid(z); }
inline double silu_slope(double z) { return sigmoid(z) + z * sigmoid(z) * sigmoid(-z); }
inline double normal_density(double z) { return std::exp(-z * z / 2) / std::sqrt(2 * M_PI); }
inline double normal_cumulative(double z) { return std::erfc(-z / std::sqrt(2.0)) / 2; }

inline double value(Activation activation, double z) {
  switch (activation) {
    case Activation::relu:
      return std::max(z, 0.0);
    case Activation::gelu_erf:
      return z * normal_cumulative(z);
    case Activation::gelu_tanh:
      return z * sigmoid(2 * std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z));
    case Activation::silu:
      return silu(z);
    default:
      return z;
  }
}

inline double slope(Activation activation, double z) {
  switch (activation) {
    case Activation::relu:
      return z > 0;
    case Activation::gelu_erf:
      return normal_cumulative(z) + z * normal_density(z);
    case Activation::gelu_tanh: {  // z s(u(z)): s + z s (1 - s) u'
      const double s = sigmoid(2 * std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z));
      return s + z * s * (1 - s) * 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * z * z);
    }
    case Activation::silu:
      return silu_slope(z);
    default:
      return 1;
  }
}

inline float plain_tanh_of_gelu(float z) { return std::tanh(0.797884560802865f * (z + 0.044715f * z * z * z)); }

inline float plain_value(Activation activation, float z) {
  switch (activation) {
    case Activation::relu:
      return std::max(z, 0.0f);
    case Activation::gelu_erf:
      return 0.5f * z * (1 + std::erf(z * 0.707106781186548f));
    case Activation::gelu_tanh:
      return 0.5f * z * (1 + plain_tanh_of_gelu(z));
    case Activation::silu:
      return z / (1 + std::exp(-z));
    default:
      return z;
  }
}

inline float plain_slope(Activation activation, float z) {
  switch (activation) {
    case Activation::relu:
      return z > 0 ? 1.0f : 0.0f;
    case Activation::gelu_erf:
      return 0.5f * (1 + std::erf(z * 0.707106781186548f)) + z * std::exp(-0.5f * z * z) * 0.398942280401433f;
    case Activation::gelu_tanh: {
      const float tanh = plain_tanh_of_gelu(z);
      return 0.5f * (1 + tanh) + 0.5f * z * (1 - tanh * tanh) * 0.797884560802865f * (1 + 3 * 0.044715f * z * z);
    }
    case Activation::silu: {
      const float s = 1 / (1 + std::exp(-z));
      return s * (1 + z * (1 - s));
    }
    default:
      return 1;
  }
}

}  // namespace heddle::kit::activations
