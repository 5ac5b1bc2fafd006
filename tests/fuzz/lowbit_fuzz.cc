// Format names made from bytes, and quantisation, its undoing and its error over views that bytes bend: each call
// throws heddle::Error or runs clean under the sanitizers. A zero byte means "as it should be". Every tensor lies in a
// heap block of exactly its bytes.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bytes.h"
#include "heddle/error.h"
#include "heddle/lowbit.h"

namespace {

using namespace heddle;
using fuzz::Bytes;
using namespace heddle::lowbit;

class Call {
 public:
  Call(const std::uint8_t* data, std::size_t size) : bytes_(data, size) {}

  void run() {
    const std::vector<std::string> names = format_names();
    std::string name = names[static_cast<std::size_t>(bytes_.below(static_cast<std::int64_t>(names.size())))];
    if (bytes_.rarely(16)) name = "nf4_b" + std::to_string(bytes_.next() * (1 + bytes_.below(64)));
    for (std::int64_t i = bytes_.rarely(32) ? 1 + bytes_.below(4) : 0; i > 0; --i)
      name += static_cast<char>(bytes_.next());
    const Format format = format_named(name);
    const std::int64_t N = 1 + bytes_.below(4);
    std::int64_t K = format.group == 0 ? 1 + bytes_.below(80) : format.group * (1 + bytes_.below(3));
    if (bytes_.rarely(16)) K += bytes_.below(16);
    QuantizedMatrix matrix = storage(format, N, K);
    for (TensorView* view : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
      if (view->given()) *view = bent(*view);
    }
    if (bytes_.rarely(32)) matrix.rows += bytes_.below(5) - 2;
    if (bytes_.rarely(32)) matrix.columns += bytes_.below(65) - 32;
    if (bytes_.rarely(64)) matrix.format.group += bytes_.below(9) - 4;
    const DType dtype = std::array{DType::f32, DType::bf16, DType::f16}[static_cast<std::size_t>(bytes_.below(3))];
    const TensorView weights = bent(TensorView(nullptr, dtype, {N, K})), out = bent(TensorView(nullptr, dtype, {N, K}));
    QuantizeOptions options;
    options.rule = static_cast<ScaleRule>(bytes_.below(6));
    if (bytes_.rarely(4)) options.importance = bent(TensorView(nullptr, DType::f32, {K}));
    if (bytes_.rarely(16)) options.global_scale = static_cast<float>(bytes_.next()) - 3;
    attempt([&] { quantize(weights, options, matrix); });
    attempt([&] { dequantize(matrix, out); });
    const TensorView rows = bytes_.rarely(2) ? TensorView() : bent(TensorView(nullptr, DType::f32, {N}));
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(quantization_error_workspace(N) - (bytes_.rarely(16) ? 8 : 0));
    attempt([&] { quantization_error(weights, matrix, rows, {}, runtime); });
  }

 private:
  template <class Work>
  static void attempt(const Work& work) {
    try {
      work();
    } catch (const Error&) {
    }
  }

  // The view, in memory of its own whose bytes follow from the input; a byte may make it what the checks must refuse.
  TensorView bent(TensorView view) {
    const std::size_t size = static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
    blocks_.push_back(std::make_unique<std::byte[]>(size));
    const int salt = bytes_.next();
    for (std::size_t i = 0; i < size; ++i) blocks_.back()[i] = static_cast<std::byte>((i * 37 + salt) % 121);
    view.data = blocks_.back().get();
    switch (bytes_.below(64)) {
      case 1:
        view = {};
        break;
      case 2:
        view.data = nullptr;
        break;
      case 3:
        view.dtype = static_cast<DType>(bytes_.below(8));
        if (size_of(view.dtype) * static_cast<std::size_t>(view.elements()) > size) view = {};
        break;
      case 4:
        view.rank = static_cast<int>(bytes_.below(3));
        break;
      case 5:
        view.shape[0] -= 1 + bytes_.below(3);
        break;
      case 6:
        view.shape[0] = bytes_.rarely(2) ? INT64_MAX : INT64_MIN;
        break;
      case 7:
        view.stride[0] = bytes_.rarely(2) ? INT64_MAX : 0;
        break;
      default:
        break;
    }
    return view;
  }

  Bytes bytes_;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Call call(data, size);
  try {
    call.run();
  } catch (const Error&) {
  }
  return 0;
}
