// A call of attention that is right, and what spoils one thing in it. The tables of bad arguments are in
// arguments_*_test.cc, by what is spoilt; arguments_test.cc says what must come of each.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "heddle/attention.h"

namespace heddle {

// B 2, Sq 5, Sk 7, H 4, Hkv 2, D 8, Dv 6.
struct Call {
  std::vector<float> data = std::vector<float>(4096, 0.5f), written = std::vector<float>(4096, -7.0f);
  std::vector<std::int32_t> index = std::vector<std::int32_t>(64, 0);
  std::vector<unsigned char> bits = std::vector<unsigned char>(1024, 1);
  WorkspaceBuffer buffer;

  TensorView q{data.data(), DType::f32, {2, 5, 4, 8}}, k{data.data(), DType::f32, {2, 7, 2, 8}},
      v{data.data(), DType::f32, {2, 7, 2, 6}}, o{written.data(), DType::f32, {2, 5, 4, 6}},
      lse{written.data() + 240, DType::f32, {2, 4, 5}};
  TensorView d_o{data.data(), DType::f32, {2, 5, 4, 6}}, d_lse;
  AttentionGradients gradients{TensorView(written.data() + 300, DType::f32, {2, 5, 4, 8}),
                               TensorView(written.data() + 700, DType::f32, {2, 7, 2, 8}),
                               TensorView(written.data() + 1000, DType::f32, {2, 7, 2, 6}),
                               {},
                               {}};
  AttentionOptions options;

  TensorView floats(std::initializer_list<std::int64_t> shape) { return {data.data(), DType::f32, shape}; }
  TensorView indices(std::vector<std::int32_t> values) {
    std::copy(values.begin(), values.end(), index.begin() + used);
    const TensorView view(index.data() + used, DType::i32, {static_cast<std::int64_t>(values.size())});
    used += values.size();
    return view;
  }
  // q [5, 4, 8] and k, v [7, ...] of two sequences.
  void pack() {
    q = floats({5, 4, 8}), k = floats({7, 2, 8}), v = floats({7, 2, 6});
    o = TensorView(written.data(), DType::f32, {5, 4, 6}), lse = TensorView(written.data() + 240, DType::f32, {4, 5});
    options.cu_seqlens_q = indices({0, 2, 5}), options.cu_seqlens_k = indices({0, 3, 7});
  }
  // k and v in 6 pages of 4 keys, two for each sequence.
  void page() {
    k = floats({6, 4, 2, 8}), v = floats({6, 4, 2, 6});
    TensorView table = indices({0, 1, 2, 3});
    options.page_table = TensorView(table.data, DType::i32, {2, 2});
  }

  void forward() {
    Runtime runtime;
    runtime.workspace = buffer.get(1 << 24);
    attention_forward(q, k, v, o, lse, options, runtime);
  }
  void backward() {
    Runtime runtime;
    runtime.workspace = buffer.get(1 << 24);
    attention_backward(q, k, v, TensorView(data.data(), o.dtype, {2, 5, 4, 6}), floats({2, 4, 5}), d_o, d_lse,
                       gradients, options, runtime);
  }
  bool untouched() const {
    return std::all_of(written.begin(), written.end(), [](float x) { return x == -7.0f; });
  }

 private:
  std::size_t used = 0;
};

struct BadArgument {
  const char* name;
  std::function<void(Call&)> spoil;
  std::string message;  // a part of it
  bool backward = false;
};

inline void PrintTo(const BadArgument& bad, std::ostream* out) { *out << bad.name; }
inline std::string name_of_test(const ::testing::TestParamInfo<BadArgument>& info) { return info.param.name; }

class BadArguments : public ::testing::TestWithParam<BadArgument> {};

}  // namespace heddle
