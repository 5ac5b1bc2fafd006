// One query over two keys with scores 0 and ln 3, so that o = v0 / 4 + v1 * 3 / 4; and a block whose layers are floats,
// for which the library opens its module over oneDNN.
#include <heddle/heddle.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

// Of zeros, so that only the residuals are left: y = x.
bool block_keeps_x() {
  using heddle::DType, heddle::TensorView;
  constexpr int kHidden = 16, kRows = 2;
  const std::vector<float> zeros(3 * kHidden * kHidden);
  const auto zero = [&](std::int64_t rows) { return TensorView(zeros.data(), DType::f32, {rows, kHidden}); };
  const TensorView norm(zeros.data(), DType::f32, {kHidden});
  const heddle::TransformerBlock block({.hidden = kHidden, .heads = 2, .intermediate = kHidden},
                                       {.qkv = zero(3 * kHidden),
                                        .out = zero(kHidden),
                                        .up = zero(kHidden),
                                        .down = zero(kHidden),
                                        .norm1 = norm,
                                        .norm2 = norm});
  std::vector<float> x(kRows * kHidden), y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  const std::int32_t starts[] = {0, kRows};
  heddle::WorkspaceBuffer buffer;
  const heddle::Runtime runtime{.workspace = buffer.get(block.workspace(kRows, 1, kRows))};
  block.forward(TensorView(x.data(), DType::f32, {kRows, kHidden}), TensorView(starts, DType::i32, {2}),
                TensorView(y.data(), DType::f32, {kRows, kHidden}), runtime);
  return x == y;
}

}  // namespace

int main() {
  using heddle::DType, heddle::TensorView;
  const float q[] = {1.0f}, k[] = {0.0f, std::log(3.0f)}, v[] = {4.0f, 8.0f};
  float out = 0.0f;
  const TensorView vq(q, DType::f32, {1, 1, 1, 1}), vk(k, DType::f32, {1, 2, 1, 1}), vv(v, DType::f32, {1, 2, 1, 1});
  heddle::WorkspaceBuffer buffer;
  const heddle::Runtime runtime{.workspace = buffer.get(heddle::attention_forward_workspace(vq, vk, vv, {}))};
  heddle::attention_forward(vq, vk, vv, TensorView(&out, DType::f32, {1, 1, 1, 1}), {}, {}, runtime);
  std::printf("heddle %s on %s: %g\n", heddle::version(), heddle::cpu_target().c_str(), out);
  return std::abs(out - 7.0f) <= 1e-5f && block_keeps_x() ? 0 : 1;
}
