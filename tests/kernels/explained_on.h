// What explain_*_on() says of GPUs that need not be here.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/backend.h"
#include "heddle/explain.h"

namespace heddle::explained_on {

inline TensorView view(DType dtype, std::initializer_list<std::int64_t> shape, Device device = Device::cpu) {
  TensorView x(nullptr, dtype, shape);
  x.device = device;
  return x;
}

struct Call {
  DType dtype = DType::bf16;
  std::int64_t Sq = 1024, Sk = 1024, D = 128;
  Device device = Device::cpu;
  AttentionOptions options = {};
  TensorView q() const { return view(dtype, {2, Sq, 8, D}, device); }
  TensorView k() const { return view(dtype, {2, Sk, 2, D}, device); }
};

inline std::string chosen(const std::vector<Candidate>& list) {
  for (const Candidate& candidate : list) {
    if (candidate.chosen) return candidate.name;
  }
  return "none";
}

inline std::string chosen_on(const char* gpu, const Call& c, Pass pass = Pass::forward) {
  return chosen(pass == Pass::forward
                    ? explain_attention_on(gpu_model_named(gpu), c.q(), c.k(), c.k(), c.options)
                    : explain_attention_backward_on(gpu_model_named(gpu), c.q(), c.k(), c.k(), {}, c.options));
}

inline std::string reason_of(const std::vector<Candidate>& list, const std::string& name) {
  for (const Candidate& candidate : list) {
    if (candidate.name == name) return candidate.reason;
  }
  return "no such candidate";
}

class ExplainOn : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::built()) GTEST_SKIP() << "a build without CUDA has no kernels to ask";
  }
};

}  // namespace heddle::explained_on
