// Weights in 4 and 8 bits: formats, quantisation and its undoing, on the CPU and on GPUs, and its error, on the CPU.
// docs/formats.md has every format to the bit and every rule with its source.
//
// A weight matrix is [N, K]: N outputs, K inputs, y = x W^T. `group` neighbouring columns of a row share a scale, and
//   W[n, k] = value(codes[n, k]) * scale[n, k / group]                      for most formats,
//   W[n, k] = value(codes[n, k]) * (scale[n, k / group] * global_scale)     with a global scale,
//   W[n, k] = (codes[n, k] - zeros[n, k / group]) * scale[n, k / group]     with zero points,
// each product rounded to f32 once. Encoding takes the code nearest to W / scale, a quotient rounded to f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/candidate.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle::lowbit {

// How one weight is coded.
enum class Element : std::uint8_t {
  e2m1,      // 4 bits: +-{0, .5, 1, 1.5, 2, 3, 4, 6} (OCP MX 1.0); ties to the even code
  e2m1_row,  // the same numbers; ties to the lower magnitude, and no -0
  nf4,       // 4 bits: 16 quantiles of the normal distribution in [-1, 1] (Dettmers et al., arXiv 2305.14314)
  fp4_bnb,   // 4 bits: +-{0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1} in bitsandbytes' order, which is not e2m1's
  int4,      // 4 bits: 0..15 less a zero point, 8 where none is stored
  int8,      // 8 bits: -127..127
  e4m3,      // 8 bits of floating point, to 448
};

// How a scale is stored. e8m0: 2^(b - 127), 255 is NaN.
enum class ScaleType : std::uint8_t { f32, f16, e4m3, e8m0 };

struct Format {
  Element element = Element::e2m1;
  ScaleType scale = ScaleType::f32;
  std::int64_t group = 0;  // columns that share a scale; 0: the whole row
  bool zero_points = false;
  bool global_scale = false;
  bool high_nibble_first = false;  // of two codes in a byte, column 2j in the high half; else in the low half

  bool operator==(const Format&) const = default;
};

// The format of a name:
//   nvfp4     e2m1, e4m3 scale per 16, one f32 global scale
//   mxfp4     e2m1, e8m0 scale per 32
//   e2m1_row  e2m1_row, f32 scale per row, high nibble first, any K
//   nf4, fp4_bnb                f32 scale per 64; nf4_b128: per 128 (32 to 4096, powers of two)
//   int4_g32, _g64, _g128       f16 scale per group; int4_g128_zp: and a zero point
//   int8_row, fp8_row           f32 scale per row, any K
// Throws Error, listing the names, for any other.
Format format_named(std::string_view name);
std::string name_of(const Format& format);
// Those of the table above, nf4 and fp4_bnb per 64.
std::vector<std::string> format_names();

// A quantised matrix in plain storage; docs/formats.md says how checkpoints' layouts differ. All contiguous.
struct QuantizedMatrix {
  Format format;
  std::int64_t rows = 0, columns = 0;  // N, K
  TensorView codes;         // u8 [N, K/2] (odd K: (K+1)/2, padded with code 0); int8: i8 [N, K]; e4m3: [N, K]
  TensorView scales;        // f32, f16, f8e4m3 or u8 (e8m0) [N, K / group], [N, 1] for one a row
  TensorView zeros;         // u8 [N, K / group], 0..15 from quantize(); only with zero points
  TensorView global_scale;  // f32 [1]; only with a global scale
};

// The shapes and dtypes of that storage, with null data: the caller allocates elements() * size_of(dtype) bytes for
// each given view. Throws Error if columns is no multiple of the group.
QuantizedMatrix storage(const Format& format, std::int64_t rows, std::int64_t columns);
// Bytes of all of it.
std::size_t storage_bytes(const QuantizedMatrix& matrix);

// How scales are chosen.
enum class ScaleRule : std::uint8_t {
  plain,     // the largest weight of the group becomes the largest code; for mxfp4: round_up
  four_six,  // nvfp4: the largest weight becomes 6 or 4, whichever errs less (Cook et al., arXiv 2512.02010)
  mse,       // search for the least squared error: nvfp4 and mxfp4 neighbouring scales, others a grid of factors
  floor,     // mxfp4: 2^(floor(log2 amax) - 2), which clips (OCP MX 1.0)
  round_up,  // mxfp4: the least power of two that clips nothing
  even,      // mxfp4: floor, of amax rounded to one bit of mantissa
};
// "plain", "four_six", ...; Error, listing them, for another.
ScaleRule rule_named(std::string_view name);
const char* name_of(ScaleRule rule);

struct QuantizeOptions {
  ScaleRule rule = ScaleRule::plain;
  // f32 [K], >= 0: column k's squared errors count importance[k] times in the search of four_six and mse. E[x_k^2] over
  // sample inputs makes that the expected squared error of the layer's output, inputs uncorrelated.
  TensorView importance = {};
  // With a format that has one: take this global scale instead of the matrix's own, for matrices that share it. 0: own.
  float global_scale = 0.0f;
  std::string force = {};  // a candidate's name
};

// weights: [N, K], f32, f16 or bf16, any strides; all of them finite. Writes `out`. Throws Error on a bad argument, a
// NaN or an infinity (with its row and column) before anything is written.
//
// On a GPU all tensors are on it, importance too, and the bytes are those of the CPU. The call then waits for the
// stream once, to read back what it found of the weights: `out` was written when it throws for them, or for an
// importance, and a stream that is being captured refuses it. It needs quantize_workspace() bytes of workspace, there.
std::size_t quantize_workspace(const TensorView& weights, const QuantizeOptions& options, const QuantizedMatrix& out,
                               const Runtime& runtime = {});
void quantize(const TensorView& weights, const QuantizeOptions& options, const QuantizedMatrix& out,
              const Runtime& runtime = {});

// The candidates for such a call, and which one would run. Reads no data but importance on the CPU.
std::vector<Candidate> explain_quantize(const TensorView& weights, const QuantizeOptions& options,
                                        const QuantizedMatrix& out, const Runtime& runtime = {});

struct DequantizeOptions {
  std::string force = {};  // a candidate's name
};

// out: [N, K], f32, f16 or bf16, any strides that do not overlap. On a GPU all tensors are on it, and the call does not
// wait for the stream.
void dequantize(const QuantizedMatrix& matrix, const TensorView& out, const DequantizeOptions& options = {},
                const Runtime& runtime = {});

// The candidates for such a call, and which one would run. Reads no data.
std::vector<Candidate> explain_dequantize(const QuantizedMatrix& matrix, const TensorView& out,
                                          const DequantizeOptions& options = {}, const Runtime& runtime = {});

// Of d = dequantised - weight.
struct QuantizationError {
  double sqnr = 0;                           // dB: 10 log10(sum w^2 / sum d^2); infinite without error
  double mean = 0, max = 0;                  // of |d|
  std::int64_t max_row = 0, max_column = 0;  // where the first largest |d| is
};

std::size_t quantization_error_workspace(std::int64_t rows);
// row_sqnr and row_max, if given: f32 [N], the same of each row (a row of zeros without error: infinite dB).
QuantizationError quantization_error(const TensorView& weights, const QuantizedMatrix& matrix,
                                     const TensorView& row_sqnr, const TensorView& row_max, const Runtime& runtime);

}  // namespace heddle::lowbit
