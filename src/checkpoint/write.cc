#include "checkpoint/write.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include <nlohmann/json.hpp>

#include "checkpoint/layouts.h"
#include "core/check.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"

namespace heddle::lowbit {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::string bnb_type(const Format& format) { return format.element == Element::nf4 ? "nf4" : "fp4"; }

std::string bnb_state(const Format& format, std::int64_t rows, std::int64_t columns, DType dtype) {
  return ordered_json{{"quant_type", bnb_type(format)},
                      {"blocksize", format.group},
                      {"dtype", name_of(dtype)},
                      {"shape", {rows, columns}}}
      .dump();
}

std::array<float, 16> bnb_map(const Format& format) {
  std::array<float, 16> map;
  for (unsigned code = 0; code < 16; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    map[code] = format.element == Element::nf4 ? NF4{bits}.value() : FP4Bnb{bits}.value();
  }
  return map;
}

std::size_t bytes_of(const TensorView& view) { return static_cast<std::size_t>(view.elements()) * size_of(view.dtype); }

// Rows of int8 in words of four: plus 128, and zeros up to whole words.
std::vector<std::uint8_t> int8_words(const QuantizedMatrix& m) {
  const std::int64_t row = ceil_div(m.columns, 4) * 4;
  std::vector<std::uint8_t> out(static_cast<std::size_t>(m.rows * row));
  const auto* codes = static_cast<const std::uint8_t*>(m.codes.data);
  for (std::int64_t n = 0; n < m.rows; ++n) {
    for (std::int64_t k = 0; k < m.columns; ++k) {
      out[static_cast<std::size_t>(n * row + k)] = codes[n * m.columns + k] ^ 0x80u;
    }
  }
  return out;
}

// Zero points along N, eight to a word: [ceil(N/8), G].
std::vector<std::uint32_t> zero_words(const QuantizedMatrix& m) {
  const std::int64_t groups = m.zeros.shape[1];
  const auto* zeros = static_cast<const std::uint8_t*>(m.zeros.data);
  std::vector<std::uint32_t> words(static_cast<std::size_t>(ceil_div(m.rows, 8) * groups));
  for (std::int64_t n = 0; n < m.rows; ++n) {
    for (std::int64_t g = 0; g < groups; ++g) {
      words[static_cast<std::size_t>(n / 8 * groups + g)] |= std::uint32_t{zeros[n * groups + g]} << (4 * (n % 8));
    }
  }
  return words;
}

// QuantizationArgs of compressed-tensors, and the name of its format.
struct Scheme {
  ordered_json weights;
  const char* format;
};
Scheme scheme_of(const Format& f) {
  const bool floating = f.element == Element::e2m1 || f.element == Element::e4m3;
  ordered_json args = {{"num_bits", bits_of(f.element)},
                       {"type", floating ? "float" : "int"},
                       {"symmetric", !f.zero_points},
                       {"strategy", f.global_scale ? "tensor_group"
                                    : f.group > 0  ? "group"
                                                   : "channel"},
                       {"group_size", f.group > 0 ? ordered_json(f.group) : ordered_json()},
                       {"dynamic", false}};
  switch (layout_for(f)) {
    case Layout::compressed_tensors_nvfp4:
      return {args, "nvfp4-pack-quantized"};
    case Layout::compressed_tensors_mxfp4:
      return {args, "mxfp4-pack-quantized"};
    case Layout::compressed_tensors_fp8:
      return {args, "float-quantized"};
    default:
      return {args, "pack-quantized"};
  }
}

}  // namespace

Layout layout_for(const Format& format) {
  switch (format.element) {
    case Element::e2m1:
      return format.global_scale ? Layout::compressed_tensors_nvfp4 : Layout::compressed_tensors_mxfp4;
    case Element::int4:
      return Layout::compressed_tensors_int4;
    case Element::int8:
      return Layout::compressed_tensors_int8;
    case Element::e4m3:
      return Layout::compressed_tensors_fp8;
    case Element::nf4:
    case Element::fp4_bnb:
      return Layout::bitsandbytes;
    case Element::e2m1_row:
      break;
  }
  throw Error("[quantize_checkpoint] no layout of checkpoints holds e2m1_row");
}

std::vector<SafeTensorsWriter::Tensor> tensors_of_layer(const std::string& name, const Format& format,
                                                        std::int64_t rows, std::int64_t columns, DType dtype) {
  const std::int64_t groups = format.group > 0 ? columns / format.group : 1;
  std::vector<SafeTensorsWriter::Tensor> out;
  const auto add = [&](const char* suffix, const char* type, std::vector<std::int64_t> shape, std::size_t element) {
    std::size_t bytes = element;
    for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
    out.push_back({name + suffix, type, std::move(shape), bytes});
  };
  switch (layout_for(format)) {
    case Layout::compressed_tensors_nvfp4:
      add(".weight_packed", "U8", {rows, columns / 2}, 1);
      add(".weight_scale", "F8_E4M3", {rows, groups}, 1);
      add(".weight_global_scale", "F32", {1}, 4);
      break;
    case Layout::compressed_tensors_mxfp4:
      add(".weight_packed", "U8", {rows, columns / 2}, 1);
      add(".weight_scale", "U8", {rows, groups}, 1);
      break;
    case Layout::compressed_tensors_fp8:
      add(".weight", "F8_E4M3", {rows, columns}, 1);
      add(".weight_scale", "F32", {rows, 1}, 4);
      break;
    case Layout::bitsandbytes: {
      add(".weight", "U8", {rows * (columns / 2), 1}, 1);
      add(".weight.absmax", "F32", {rows * groups}, 4);
      add(".weight.quant_map", "F32", {16}, 4);
      const std::string state = ".weight.quant_state.bitsandbytes__" + bnb_type(format);
      add(state.c_str(), "U8", {static_cast<std::int64_t>(bnb_state(format, rows, columns, dtype).size())}, 1);
      break;
    }
    default:
      add(".weight_packed", "I32", {rows, ceil_div(columns * bits_of(format.element), 32)}, 4);
      add(".weight_scale", format.scale == ScaleType::f16 ? "F16" : "F32", {rows, groups},
          format.scale == ScaleType::f16 ? 2 : 4);
      add(".weight_shape", "I64", {2}, 8);
      if (format.zero_points) add(".weight_zero_point", "I32", {ceil_div(rows, 8), groups}, 4);
  }
  return out;
}

void write_layer(const std::string& name, const QuantizedMatrix& m, DType dtype, SafeTensorsWriter& writer) {
  const auto view = [&](const char* suffix, const TensorView& from) {
    writer.write(name + suffix, from.data, bytes_of(from));
  };
  const auto values = [&](const std::string& suffix, const auto& from) {
    writer.write(name + suffix, from.data(), from.size() * sizeof from[0]);
  };
  switch (layout_for(m.format)) {
    case Layout::compressed_tensors_nvfp4: {
      view(".weight_packed", m.codes);
      view(".weight_scale", m.scales);
      const float divisor = 1.0f / *static_cast<const float*>(m.global_scale.data);
      writer.write(name + ".weight_global_scale", &divisor, sizeof divisor);
      break;
    }
    case Layout::compressed_tensors_mxfp4:
      view(".weight_packed", m.codes);
      view(".weight_scale", m.scales);
      break;
    case Layout::compressed_tensors_fp8:
      view(".weight", m.codes);
      view(".weight_scale", m.scales);
      break;
    case Layout::bitsandbytes: {
      auto* codes = static_cast<std::uint8_t*>(m.codes.data);
      for (std::size_t i = 0; i < bytes_of(m.codes); ++i) {
        codes[i] = static_cast<std::uint8_t>(codes[i] << 4 | codes[i] >> 4);
      }
      view(".weight", m.codes);
      view(".weight.absmax", m.scales);
      values(".weight.quant_map", bnb_map(m.format));
      values(".weight.quant_state.bitsandbytes__" + bnb_type(m.format), bnb_state(m.format, m.rows, m.columns, dtype));
      break;
    }
    default:
      if (m.format.element == Element::int8) {
        values(".weight_packed", int8_words(m));
      } else {
        view(".weight_packed", m.codes);
      }
      view(".weight_scale", m.scales);
      values(".weight_shape", std::array<std::int64_t, 2>{m.rows, m.columns});
      if (m.format.zero_points) values(".weight_zero_point", zero_words(m));
  }
}

float power_of_two_global_scale(ScaleRule rule, float largest) {
  int exponent = 0;
  const float mantissa = std::frexp(own_global_scale(rule, largest), &exponent);
  if (mantissa == 0.5f) --exponent;
  return std::ldexp(1.0f, std::clamp(exponent, -126, 126));  // whose inverse is a normal number too
}

std::string quantization_config_of(const std::map<std::string, Format>& layers, const std::vector<std::string>& kept,
                                   const std::string& compute_dtype) {
  std::vector<std::pair<Format, std::vector<std::string>>> groups;
  for (const auto& [name, format] : layers) {
    auto group =
        std::find_if(groups.begin(), groups.end(), [&, &wanted = format](const auto& g) { return g.first == wanted; });
    if (group == groups.end()) group = groups.insert(groups.end(), {format, {}});
    group->second.push_back(name);
  }
  const Check check("quantize_checkpoint");
  const bool bnb = layout_for(groups[0].first) == Layout::bitsandbytes;
  for (const auto& [format, names] : groups) {
    const bool other = bnb ? format.element != groups[0].first.element : layout_for(format) == Layout::bitsandbytes;
    check.require(!other, "formats ", name_of(groups[0].first), " and ", name_of(format),
                  " are in one checkpoint: config.json can name one of nf4, fp4_bnb and compressed-tensors' formats");
  }
  // A tied output layer is in no file, and a linear layer all the same.
  std::vector<std::string> ignored = kept;
  if (!layers.contains("lm_head") && std::find(kept.begin(), kept.end(), "lm_head") == kept.end()) {
    ignored.emplace_back("lm_head");
  }
  if (bnb) {
    return ordered_json{{"quant_method", "bitsandbytes"},
                        {"load_in_4bit", true},
                        {"load_in_8bit", false},
                        {"bnb_4bit_quant_type", bnb_type(groups[0].first)},
                        {"bnb_4bit_use_double_quant", false},
                        {"bnb_4bit_compute_dtype", compute_dtype},
                        {"bnb_4bit_quant_storage", "uint8"},
                        {"llm_int8_skip_modules", ignored}}
        .dump(2);
  }
  ordered_json config_groups = ordered_json::object();
  for (const auto& [format, names] : groups) {
    const Scheme scheme = scheme_of(format);
    config_groups[text("group_", config_groups.size())] = {
        {"targets", groups.size() == 1 ? std::vector<std::string>{"Linear"} : names},
        {"weights", scheme.weights},
        {"input_activations", nullptr},
        {"output_activations", nullptr},
        {"format", scheme.format}};
  }
  return ordered_json{{"quant_method", "compressed-tensors"},
                      {"format", groups.size() == 1 ? scheme_of(groups[0].first).format : "mixed-precision"},
                      {"quantization_status", "compressed"},
                      {"config_groups", config_groups},
                      {"ignore", ignored}}
      .dump(2);
}

}  // namespace heddle::lowbit
