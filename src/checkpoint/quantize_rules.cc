#include "checkpoint/quantize_rules.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/check.h"
#include "core/in_quotes.h"

namespace heddle::lowbit {
namespace {

const Check kCheck("quantize_checkpoint");

// Parts of a name, between dots, that no linear layer has. GPT-2's c_attn, c_fc and c_proj have their extents the
// other way round, and nothing in the file says so: they are quantised where a rule names them.
constexpr std::string_view kWholeParts[] = {"gate", "router", "lm_head", "c_attn", "c_fc", "c_proj"};
constexpr std::string_view kPieces[] = {"embed", "norm", "conv", "position", "relative_attention_bias"};

// Last parts of names whose products run as one.
struct Fused {
  std::array<std::string_view, 3> parts;
  std::string_view together;
};
constexpr Fused kFused[] = {{{"q_proj", "k_proj", "v_proj"}, "{q,k,v}_proj"},
                            {{"query", "key", "value"}, "{query,key,value}"},
                            {{"q_lin", "k_lin", "v_lin"}, "{q,k,v}_lin"},
                            {{"q", "k", "v"}, "{q,k,v}"},
                            {{"gate_proj", "up_proj"}, "{gate,up}_proj"},
                            {{"w1", "w3"}, "{w1,w3}"},
                            {{"wi_0", "wi_1"}, "{wi_0,wi_1}"}};

bool number(std::string_view part) {
  return !part.empty() && std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// Whether what begins at pattern[at] and is no "*" stands for c; *end: where it ends.
bool stands_for(std::string_view pattern, std::size_t at, char c, std::size_t* end) {
  *end = at + 1;
  if (pattern[at] != '[') return pattern[at] == '?' || pattern[at] == c;
  const bool others = pattern.substr(at + 1).starts_with('!');
  std::size_t i = at + 1 + (others ? 1 : 0);
  const std::size_t close = pattern.find(']', i + 1);  // a "]" right behind the bracket is one of the characters
  if (close == std::string_view::npos) return c == '[';
  *end = close + 1;
  bool found = false;
  while (i < close) {
    const bool range = i + 2 < close && pattern[i + 1] == '-';
    found |= pattern[i] <= c && c <= pattern[range ? i + 2 : i];
    i += range ? 3 : 1;
  }
  return found != others;
}

}  // namespace

bool matches(const std::string& pattern, const std::string& name) {
  // Greedy: only the last "*" can have to take more.
  std::size_t p = 0, n = 0, star = std::string::npos, resumed = 0, end = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resumed = n;
    } else if (p < pattern.size() && stands_for(pattern, p, name[n], &end)) {
      p = end;
      ++n;
    } else if (star != std::string::npos) {
      p = star + 1;
      n = ++resumed;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

bool linear_layer(const std::string& name) {
  bool numbered = false;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = std::string_view(name).substr(begin, end - begin);
    begin = end + 1;
    numbered = numbered || number(part);
    if (std::find(std::begin(kWholeParts), std::end(kWholeParts), part) != std::end(kWholeParts)) return false;
    std::string lower(part);
    for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    for (const std::string_view piece : kPieces) {
      if (lower.find(piece) != std::string::npos) return false;
    }
  }
  return numbered;
}

std::string fused_name(const std::string& layer) {
  const std::size_t dot = layer.rfind('.');
  const std::size_t begin = dot == std::string::npos ? 0 : dot + 1;
  const std::string_view last = std::string_view(layer).substr(begin);
  for (const Fused& fused : kFused) {
    if (std::find(fused.parts.begin(), fused.parts.end(), last) == fused.parts.end()) continue;
    return layer.substr(0, begin) + std::string(fused.together);
  }
  return layer;
}

LayerChoice choice_of(const std::string& format, ScaleRule rule) {
  if (format == "keep") return {};
  if (format == "16bit") return {.kind = LayerChoice::Kind::sixteen_bits, .format = {}};
  const std::size_t colon = format.find(':');
  LayerChoice choice{.kind = LayerChoice::Kind::quantized,
                     .format = format_named(format.substr(0, colon)),
                     .rule = colon == std::string::npos ? rule : rule_named(format.substr(colon + 1))};
  kCheck.require(choice.format.element != Element::e2m1_row, "format is ", in_quotes(format),
                 ": no layout of checkpoints holds it");
  return choice;
}

LayerChooser::LayerChooser(const QuantizeCheckpointOptions& options)
    : others_(choice_of(options.format, options.rule)) {
  for (const LayerRule& rule : options.layers) {
    kCheck.require(!rule.pattern.empty(), "a rule's pattern is empty");
    rules_.push_back({rule.pattern, choice_of(rule.format, options.rule), false});
  }
}

LayerChoice LayerChooser::choose(const std::string& layer) {
  for (Rule& rule : rules_) {
    if (!matches(rule.pattern, layer)) continue;
    rule.matched = true;
    return rule.choice;
  }
  return linear_layer(layer) ? others_ : LayerChoice();
}

void LayerChooser::require_all_matched() const {
  for (const Rule& rule : rules_) {
    kCheck.require(rule.matched, "pattern ", in_quotes(rule.pattern),
                   " decides over no layer: it must match the name of a 2-D weight, less .weight, that no rule before "
                   "it matches");
  }
}

}  // namespace heddle::lowbit
