// Moves a layer's bits into plain storage: first a look at every scale and zero point, and at codes that may be NaN,
// then the writing.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/layouts.h"
#include "core/check.h"
#include "core/dtypes.h"
#include "core/parallel.h"
#include "lowbit/formats.h"

namespace heddle::lowbit {
namespace {

// Words of checkpoints are little-endian; their bytes are the storage's then.
static_assert(std::endian::native == std::endian::little);

// Rows of a task: a line of 64 bytes holds 16 words of GPTQ and 4 kB hold the scales that such rows share lines of.
constexpr std::int64_t kTaskRows = 64;

// Where awq puts row r of 8 in a word.
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Nibble j of word i becomes nibble i of word j: blocks of 4, of 2 and of 1 change places across the diagonal.
void transpose_nibbles(std::array<std::uint32_t, 8>& words) {
  constexpr std::uint32_t kLowBlocks[] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu};
  for (int step = 0, size = 4; size > 0; ++step, size /= 2) {
    for (int i = 0; i < 8; ++i) {
      if ((i & size) != 0) continue;
      std::uint32_t &upper = words[i], &lower = words[i + size];
      const std::uint32_t exchanged = (upper >> (4 * size) ^ lower) & kLowBlocks[step];
      lower ^= exchanged;
      upper ^= exchanged << (4 * size);
    }
  }
}

// The layer's matrix, one expert's where it has several.
struct Source {
  const LayerSource& layer;
  const std::byte *codes, *scales;
  std::int64_t N, K, groups;  // groups of the storage

  Source(const LayerSource& source, std::int64_t expert)
      : layer(source),
        codes(source.codes.bytes() + expert * source.layer.rows * (source.layer.columns / 2)),
        scales(source.scales.bytes()),
        N(source.layer.rows),
        K(source.layer.columns),
        groups(source.file_groups * source.repeat) {
    if (source.layer.experts > 0) scales += expert * N * source.file_groups;
  }

  // Of a row of the storage.
  std::int64_t code_bytes() const { return K * bits_of(layer.layer.format.element) / 8; }
  // In the file's tensor of scales.
  std::int64_t scale_index(std::int64_t n, std::int64_t g) const {
    return layer.scales_transposed ? g * N + n : n * layer.file_groups + g;
  }
  // Of scales that are, or are to be, floating point.
  float scale(std::int64_t index) const {
    switch (layer.scale_source) {
      case ScaleSource::f16:
        return f16_to_f32(value_at<std::uint16_t>(scales, index));
      case ScaleSource::bf16:
        return bf16_to_f32(value_at<std::uint16_t>(scales, index));
      case ScaleSource::nested: {
        const NestedAbsmax& nested = layer.nested;
        const float value = value_at<float>(nested.map, std::to_integer<std::int64_t>(scales[index]));
        const float absmax = value_at<float>(nested.absmax, index / nested.block);
        // Rounded before the sum on every target: the product is exact in double.
        const auto product = static_cast<float>(static_cast<double>(value) * absmax);
        return product + nested.offset;
      }
      default:
        return value_at<float>(scales, index);
    }
  }
  float e4m3_scale(std::int64_t index) const { return kE4M3Values[std::to_integer<std::uint8_t>(scales[index])]; }
  // If the format holds scale g of row n as it is.
  bool scale_fits(std::int64_t n, std::int64_t g) const {
    const std::int64_t index = scale_index(n, g);
    if (layer.scale_source == ScaleSource::e8m0) return scales[index] != std::byte{255};
    if (layer.scale_source == ScaleSource::e4m3) {
      return scales[index] < std::byte{0x7f} && std::isfinite(e4m3_scale(index) * layer.global_scale);
    }
    const float value = scale(index);
    if (layer.layer.format.scale == ScaleType::f32) return std::isfinite(value);
    return std::isfinite(value) && f16_to_f32(f32_to_f16(value)) == value;
  }

  // If code k of row n is a number; of e4m3, which lie as in storage.
  bool code_fits(std::int64_t n, std::int64_t k) const {
    return (codes[n * K + k] & std::byte{0x7f}) != std::byte{0x7f};
  }

  // Zero point g of row n.
  int zero(std::int64_t n, std::int64_t g) const {
    const std::byte* words = layer.zeros.bytes();
    const std::int64_t row_word = n / 8;
    const int nibble = static_cast<int>(n % 8);
    switch (layer.zero_order) {
      case ZeroOrder::gptq:
        return static_cast<int>(value_at<std::uint32_t>(words, g * (N / 8) + row_word) >> (4 * nibble) & 15u) +
               layer.zero_added;
      case ZeroOrder::awq:
        return static_cast<int>(value_at<std::uint32_t>(words, g * (N / 8) + row_word) >> (4 * kAwqNibble[nibble]) &
                                15u);
      default:
        return static_cast<int>(value_at<std::uint32_t>(words, row_word * layer.file_groups + g) >> (4 * nibble) & 15u);
    }
  }

  // Eight columns of the file to a word of the storage, for layers whose columns change places. Both gptq's and
  // compressed-tensors' words hold eight columns of a row.
  void write_reordered(std::int64_t begin, std::int64_t end, std::uint8_t* out) const {
    const std::int32_t* order = layer.layer.column_order.data();
    const bool rows_adjacent = layer.code_order == CodeOrder::gptq;
    const std::int64_t row_step = rows_adjacent ? 1 : K / 8, column_step = rows_adjacent ? N : 1;
    for (std::int64_t w = 0; w < K / 8; ++w) {
      std::uint32_t words[kTaskRows] = {};
      for (int i = 0; i < 8; ++i) {
        const std::int64_t k = order[8 * w + i], first = k / 8 * column_step + begin * row_step;
        const int shift = static_cast<int>(4 * (k % 8));
        for (std::int64_t r = 0; r < end - begin; ++r) {
          words[r] |= (value_at<std::uint32_t>(codes, first + r * row_step) >> shift & 15u) << (4 * i);
        }
      }
      for (std::int64_t r = 0; r < end - begin; ++r) store_word(words[r], out, begin + r, w);
    }
  }
  // Columns 8w to 8w + 7 of a row.
  void store_word(std::uint32_t word, std::uint8_t* out, std::int64_t n, std::int64_t w) const {
    std::memcpy(out + n * (K / 2) + 4 * w, &word, sizeof word);
  }

  // Codes of rows [begin, end), to `out`, the storage's row 0.
  void write_codes(std::int64_t begin, std::int64_t end, std::uint8_t* out) const {
    const std::int64_t row_bytes = code_bytes();
    if (!layer.layer.column_order.empty()) return write_reordered(begin, end, out);
    switch (layer.code_order) {
      case CodeOrder::plain:
        std::memcpy(out + begin * row_bytes, codes + begin * row_bytes,
                    static_cast<std::size_t>((end - begin) * row_bytes));
        break;
      case CodeOrder::words_int8: {
        const std::int64_t file_bytes = (row_bytes + 3) / 4 * 4;
        for (std::int64_t n = begin; n < end; ++n) {
          const std::byte* from = codes + n * file_bytes;
          for (std::int64_t k = 0; k < row_bytes; ++k) {
            out[n * row_bytes + k] = std::to_integer<std::uint8_t>(from[k] ^ std::byte{0x80});
          }
        }
        break;
      }
      case CodeOrder::high_first:
        for (std::int64_t i = begin * row_bytes; i < end * row_bytes; ++i) {
          const auto byte = std::to_integer<unsigned>(codes[i]);
          out[i] = NibblePair::of(byte >> 4, byte).byte;
        }
        break;
      case CodeOrder::gptq:
        for (std::int64_t w = 0; w < K / 8; ++w) {
          for (std::int64_t n = begin; n < end; ++n) {
            std::memcpy(out + n * row_bytes + 4 * w, codes + 4 * (w * N + n), 4);
          }
        }
        break;
      case CodeOrder::awq:  // N is a multiple of 8, and so are begin and end
        for (std::int64_t w = 0; w < K / 8; ++w) {
          for (std::int64_t n = begin; n < end; n += 8) {
            std::array<std::uint32_t, 8> words;
            for (int i = 0; i < 8; ++i) words[i] = value_at<std::uint32_t>(codes, ((8 * w + i) * N + n) / 8);
            transpose_nibbles(words);
            for (int r = 0; r < 8; ++r) store_word(words[kAwqNibble[r]], out, n + r, w);
          }
        }
        break;
    }
  }

  void write_scales(std::int64_t n, const QuantizedMatrix& out) const {
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t from = scale_index(n, g / layer.repeat), to = n * groups + g;
      switch (layer.layer.format.scale) {
        case ScaleType::f32:
          static_cast<float*>(out.scales.data)[to] = scale(from);
          break;
        case ScaleType::f16:
          static_cast<std::uint16_t*>(out.scales.data)[to] = f32_to_f16(scale(from));
          break;
        default:
          static_cast<std::byte*>(out.scales.data)[to] = scales[from];
      }
      if (layer.zero_order != ZeroOrder::none) {
        static_cast<std::uint8_t*>(out.zeros.data)[to] = static_cast<std::uint8_t>(zero(n, g / layer.repeat));
      }
    }
  }
};

// Calls task(begin, end) for pieces of the rows.
template <class Task>
void for_row_pieces(std::int64_t rows, Executor& executor, const Task& task) {
  parallel_for(executor, (rows + kTaskRows - 1) / kTaskRows,
               [&](std::int64_t i, int) { task(i * kTaskRows, std::min(rows, (i + 1) * kTaskRows)); });
}

// The first row with a group, of `groups`, that fits(n, g) denies; its first such group.
template <class Fits>
bool find_misfit(const Source& source, std::int64_t groups, Executor& executor, std::int64_t* row, std::int64_t* group,
                 const Fits& fits) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::atomic<std::int64_t> first{kNone};
  for_row_pieces(source.N, executor, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      for (std::int64_t g = 0; g < groups; ++g) {
        if (fits(n, g)) continue;
        std::int64_t least = first.load();
        while (n < least && !first.compare_exchange_weak(least, n)) {
        }
        return;
      }
    }
  });
  *row = first.load();
  if (*row == kNone) return false;
  for (*group = 0; fits(*row, *group); ++*group) {
  }
  return true;
}

[[noreturn]] void refuse_scale(const Source& source, std::int64_t expert, std::int64_t n, std::int64_t g) {
  const LayerSource& layer = source.layer;
  const std::int64_t index = source.scale_index(n, g);
  const std::string at = text(layer.scales.where, ", ", layer.layer.experts > 0 ? text("expert ", expert, ", ") : "",
                              "row ", n, ", group ", g, ", is ");
  if (layer.scale_source == ScaleSource::e8m0) throw Error(text("[checkpoint] ", at, "255, which is NaN"));
  if (layer.scale_source == ScaleSource::e4m3) {
    const float value = source.e4m3_scale(index);
    throw Error(text("[checkpoint] ", at, value,
                     source.scales[index] < std::byte{0x7f}
                         ? text(", times the global scale, ", layer.global_scale, ", ", value * layer.global_scale,
                                ": scales must be finite")
                         : ": scales of nvfp4 are finite, with the sign bit clear"));
  }
  const float value = source.scale(index);
  throw Error(text(
      "[checkpoint] ", at, value,
      std::isfinite(value) ? ": storage has float16 scales, which do not hold it exactly" : ": scales must be finite"));
}

}  // namespace

void load_layer(const LayerSource& layer, std::int64_t expert, const QuantizedMatrix& out, Executor& executor) {
  const Source source(layer, expert);
  std::int64_t n = 0, g = 0;
  const std::int64_t groups = layer.file_groups;
  if (find_misfit(source, groups, executor, &n, &g,
                  [&](std::int64_t row, std::int64_t group) { return source.scale_fits(row, group); })) {
    refuse_scale(source, expert, n, g);
  }
  if (layer.zero_added > 0 && find_misfit(source, groups, executor, &n, &g, [&](std::int64_t row, std::int64_t group) {
        return source.zero(row, group) <= 15;
      })) {
    throw Error(text("[checkpoint] ", layer.zeros.where, ", row ", n, ", group ", g,
                     ", is stored as 15, a zero point of ", source.zero(n, g),
                     " in version 1 of gptq: zero points are from 0 to 15"));
  }
  if (layer.layer.format.element == Element::e4m3 &&
      find_misfit(source, source.K, executor, &n, &g,
                  [&](std::int64_t row, std::int64_t column) { return source.code_fits(row, column); })) {
    throw Error(
        text("[checkpoint] ", layer.codes.where, ", row ", n, ", column ", g, ", is nan: codes must be finite"));
  }
  if (layer.layer.format.global_scale) *static_cast<float*>(out.global_scale.data) = layer.global_scale;
  for_row_pieces(source.N, executor, [&](std::int64_t begin, std::int64_t end) {
    source.write_codes(begin, end, static_cast<std::uint8_t*>(out.codes.data));
    for (std::int64_t row = begin; row < end; ++row) source.write_scales(row, out);
  });
}

}  // namespace heddle::lowbit
