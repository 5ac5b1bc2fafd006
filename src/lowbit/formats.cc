// Names of formats and rules, and the shapes of plain storage.
#include "lowbit/formats.h"

#include <charconv>

#include "core/check.h"
#include "core/names.h"
#include "lowbit/rules.h"
#include "lowbit/scale_rules.h"

namespace heddle::lowbit {
namespace {

constexpr Format int4(std::int64_t group, bool zero_points) {
  return {.element = Element::int4, .scale = ScaleType::f16, .group = group, .zero_points = zero_points};
}

constexpr NamedValue<Format> kFormats[] = {
    {"nvfp4", {.element = Element::e2m1, .scale = ScaleType::e4m3, .group = 16, .global_scale = true}},
    {"mxfp4", {.element = Element::e2m1, .scale = ScaleType::e8m0, .group = 32}},
    {"e2m1_row", {.element = Element::e2m1_row, .high_nibble_first = true}},
    {"nf4", {.element = Element::nf4, .group = 64}},
    {"fp4_bnb", {.element = Element::fp4_bnb, .group = 64}},
    {"int4_g32", int4(32, false)},
    {"int4_g64", int4(64, false)},
    {"int4_g128", int4(128, false)},
    {"int4_g32_zp", int4(32, true)},
    {"int4_g64_zp", int4(64, true)},
    {"int4_g128_zp", int4(128, true)},
    {"int8_row", {.element = Element::int8}},
    {"fp8_row", {.element = Element::e4m3}},
};

// Block sizes that nf4 and fp4_bnb may have.
constexpr std::int64_t kLeastBlock = 32, kLargestBlock = 4096;

// "nf4_b128" and its like: `format` with that block size.
bool with_block(std::string_view name, const NamedValue<Format>& plain, Format* format) {
  const std::string prefix = std::string(plain.name) + "_b";
  if (!name.starts_with(prefix)) return false;
  const std::string_view digits = name.substr(prefix.size());
  std::int64_t block = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), block);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.front() == '0') return false;
  if (block < kLeastBlock || block > kLargestBlock || (block & (block - 1)) != 0) return false;
  *format = plain.value;
  format->group = block;
  return true;
}

bool has_blocks(const Format& format) { return format.element == Element::nf4 || format.element == Element::fp4_bnb; }

constexpr NamedValue<ScaleRule> kRules[] = {{"plain", ScaleRule::plain},       {"four_six", ScaleRule::four_six},
                                            {"mse", ScaleRule::mse},           {"floor", ScaleRule::floor},
                                            {"round_up", ScaleRule::round_up}, {"even", ScaleRule::even}};

}  // namespace

Format format_named(std::string_view name) {
  std::string known;
  for (const NamedValue<Format>& candidate : kFormats) {
    if (name == candidate.name) return candidate.value;
    Format format;
    if (has_blocks(candidate.value) && with_block(name, candidate, &format)) return format;
    known += std::string(candidate.name) + ", ";
  }
  throw Error(text("[lowbit] format is '", name, "': it must be one of ", known,
                   "or nf4_bN, fp4_bnb_bN with N a power of two from ", kLeastBlock, " to ", kLargestBlock));
}

std::string name_of(const Format& format) {
  for (const NamedValue<Format>& candidate : kFormats) {
    if (format == candidate.value) return candidate.name;
    if (!has_blocks(candidate.value)) continue;
    const std::string name = text(candidate.name, "_b", format.group);
    Format named;
    if (with_block(name, candidate, &named) && named == format) return name;
  }
  throw Error("[lowbit] format is none that has a name: take one from format_named()");
}

std::vector<std::string> format_names() { return names_in(kFormats); }

std::vector<std::string> rule_names() { return names_in(kRules); }
ScaleRule rule_named(std::string_view name) { return value_named(kRules, name, "lowbit", "rule"); }
const char* name_of(ScaleRule rule) { return name_in(kRules, rule); }

QuantizedMatrix storage(const Format& format, std::int64_t rows, std::int64_t columns) {
  const Check check("lowbit");
  const std::string name = name_of(format);
  check.require(rows >= 0 && columns >= 0 && rows <= kLargestExtent && columns <= kLargestExtent, "a matrix of ", rows,
                " by ", columns, ": extents are from 0 to 2^31 - 1");
  check.require(format.group == 0 || columns % format.group == 0, "K is ", columns, ": ", name,
                " needs a multiple of its group, ", format.group, "; the next is ",
                format.group == 0 ? 0 : (columns / format.group + 1) * format.group);
  const std::int64_t groups = format.group == 0 ? 1 : columns / format.group;
  QuantizedMatrix out;
  out.format = format;
  out.rows = rows;
  out.columns = columns;
  const std::int64_t row_codes = bits_of(format.element) == 4 ? (columns + 1) / 2 : columns;
  out.codes = TensorView(nullptr, code_dtype(format.element), {rows, row_codes});
  out.scales = TensorView(nullptr, scale_dtype(format.scale), {rows, groups});
  if (format.zero_points) out.zeros = TensorView(nullptr, DType::u8, {rows, groups});
  if (format.global_scale) out.global_scale = TensorView(nullptr, DType::f32, {1});
  return out;
}

std::size_t storage_bytes(const QuantizedMatrix& matrix) {
  std::size_t bytes = 0;
  for (const TensorView* view : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
    if (view->given()) bytes += static_cast<std::size_t>(view->elements()) * size_of(view->dtype);
  }
  return bytes;
}

}  // namespace heddle::lowbit
