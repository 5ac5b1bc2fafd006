// What libheddle_onednn has for the library, which opens it when the first float layer on the CPU is made (linear.cc),
// so that the library itself needs no oneDNN. Both are of one build. Nothing of the library is called from there by
// name, as a program may have it linked in; and what is thrown there is one of std's exceptions or derives from one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "heddle/tensor.h"

namespace heddle {

// As FloatLinear (model/linear.h).
class OneDnnLayer {
 public:
  virtual ~OneDnnLayer() = default;
  virtual std::size_t weight_bytes() const = 0;
  virtual std::size_t scratch_bytes() const = 0;
  virtual void run(const void* x, void* y, std::int64_t rows, std::byte* scratch) const = 0;
};

struct OneDnnLayerShape {
  std::int64_t out, in;
  DType dtype, y_dtype;
};

// The library's conversions, for the processor at hand (cpu/row_ops.h).
struct OneDnnHost {
  void (*widen)(const std::uint16_t* x, std::int64_t count, float* out);
  void (*narrow)(const float* x, std::int64_t count, std::uint16_t* out);
};

struct OneDnnModule {
  const char* heddle_version;  // first, and compared before anything else is read
  // Writes oneDNN's own version.
  void (*onednn_version)(int* major, int* minor, int* patch);
  std::unique_ptr<OneDnnLayer> (*make)(const OneDnnHost& host, const OneDnnLayerShape& shape, const float* weight,
                                       const float* bias);
};

// The module's only symbol that is seen from outside is `extern "C" const OneDnnModule heddle_onednn`.
constexpr const char* kOneDnnModuleFile = "libheddle_onednn.so";
constexpr const char* kOneDnnModuleSymbol = "heddle_onednn";

}  // namespace heddle
