// One query over two keys with scores 0 and ln 3, so that o = v0 / 4 + v1 * 3 / 4.
#include <heddle/heddle.h>

#include <cmath>
#include <cstdio>

int main() {
  using heddle::DType, heddle::TensorView;
  const float q[] = {1.0f}, k[] = {0.0f, std::log(3.0f)}, v[] = {4.0f, 8.0f};
  float out = 0.0f;
  const TensorView vq(q, DType::f32, {1, 1, 1, 1}), vk(k, DType::f32, {1, 2, 1, 1}), vv(v, DType::f32, {1, 2, 1, 1});
  heddle::WorkspaceBuffer buffer;
  const heddle::Runtime runtime{.workspace = buffer.get(heddle::attention_forward_workspace(vq, vk, vv, {}))};
  heddle::attention_forward(vq, vk, vv, TensorView(&out, DType::f32, {1, 1, 1, 1}), {}, {}, runtime);
  std::printf("heddle %s on %s: %g\n", heddle::version(), heddle::cpu_target().c_str(), out);
  return std::abs(out - 7.0f) <= 1e-5f ? 0 : 1;
}
