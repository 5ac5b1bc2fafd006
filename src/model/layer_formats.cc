#include "model/layer_formats.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "checkpoint/quantize_rules.h"
#include "core/in_quotes.h"

namespace heddle {

namespace {

constexpr DType kFloating[] = {DType::f32, DType::f16, DType::bf16};

}  // namespace

LayerFormats::LayerFormats(const Check& check, std::vector<lowbit::LayerRule> rules, DType dtype, Device device)
    : rules_(std::move(rules)), matched_(rules_.size(), false) {
  for (const lowbit::LayerRule& rule : rules_) {
    if (is_floating(rule.format) && (device == Device::cuda || rule.format != name_of(DType::f16))) {
      check.require(device == Device::cpu || rule.format == name_of(dtype), "pattern ", in_quotes(rule.pattern),
                    " asks for ", rule.format, ": on a GPU products are in dtype, ", name_of(dtype), ", or low-bit");
      continue;
    }
    const std::size_t colon = rule.format.find(':');
    lowbit::format_named(rule.format.substr(0, colon));
    if (colon != std::string::npos) lowbit::rule_named(rule.format.substr(colon + 1));
  }
}

bool LayerFormats::is_floating(const std::string& format) {
  return std::any_of(std::begin(kFloating), std::end(kFloating), [&](DType dtype) { return format == name_of(dtype); });
}

DType LayerFormats::precision(const std::string& format, DType dtype) {
  for (const DType one : kFloating) {
    if (format == name_of(one)) return one;
  }
  return dtype;
}

std::string LayerFormats::of(const std::string& name) {
  for (std::size_t i = 0; i < rules_.size(); ++i) {
    if (!lowbit::matches(rules_[i].pattern, name)) continue;
    matched_[i] = true;
    return rules_[i].format;
  }
  return {};
}

void LayerFormats::require_all_matched(const Check& check, const std::string& names) const {
  for (std::size_t i = 0; i < rules_.size(); ++i) {
    check.require(matched_[i], "pattern ", in_quotes(rules_[i].pattern), " decides over no layer: names are ", names);
  }
}

OwnedMatrix::OwnedMatrix(const lowbit::Format& format, std::int64_t rows, std::int64_t columns)
    : matrix(lowbit::storage(format, rows, columns)) {
  TensorView* parts[] = {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale};
  for (std::size_t i = 0; i < std::size(parts); ++i) {
    if (!parts[i]->given()) continue;
    memory[i].resize(static_cast<std::size_t>(parts[i]->elements()) * size_of(parts[i]->dtype));
    parts[i]->data = memory[i].data();
  }
}

OwnedMatrix quantized(const Check& check, const std::string& name, const float* weight, std::int64_t out,
                      std::int64_t in, const std::string& format) {
  const std::size_t colon = format.find(':');
  const lowbit::Format wanted = lowbit::format_named(format.substr(0, colon));
  check.require(wanted.group == 0 || in % wanted.group == 0, name, " is [", out, ", ", in, "]: K = ", in,
                " is no multiple of ", wanted.group, ", the group of ", lowbit::name_of(wanted));
  OwnedMatrix result(wanted, out, in);
  lowbit::QuantizeOptions options;
  if (colon != std::string::npos) options.rule = lowbit::rule_named(format.substr(colon + 1));
  try {
    lowbit::quantize(TensorView(weight, DType::f32, {out, in}), options, result.matrix);
  } catch (const Error& error) {
    check.require(false, name, ": ", error.what());
  }
  return result;
}

}  // namespace heddle
