// Patterns as text, both ways.
#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>

#include "core/check.h"
#include "core/in_quotes.h"
#include "patterns/node.h"

namespace heddle {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max(), kSmallest = -kLargest;
constexpr int kDeepest = 100;  // parentheses in parentheses: each is a call on the stack

struct Number {
  const char* name;
  std::int64_t least;
  std::optional<std::int64_t> usual;  // what it is where it is not given
};

// A name of the grammar. Of a set the first number stands for all.
struct Form {
  const char* name;
  PatternKind kind;
  bool set;
  std::array<Number, 3> numbers;
  std::size_t count;
};

constexpr Form kForms[] = {
    {"local", PatternKind::local, false, {{{"left", 0, {}}, {"right", 0, {}}, {}}}, 2},
    {"strided", PatternKind::strided, false, {{{"step", 1, {}}, {}, {}}}, 1},
    {"dilated", PatternKind::dilated, false, {{{"n", 0, {}}, {"step", 1, {}}, {}}}, 2},
    {"sink", PatternKind::sink, false, {{{"n", 0, {}}, {}, {}}}, 1},
    {"columns", PatternKind::columns, true, {{{"a column", 0, {}}, {}, {}}}, 1},
    {"rows", PatternKind::rows, true, {{{"a row", 0, {}}, {}, {}}}, 1},
    {"diagonals", PatternKind::diagonals, true, {{{"a diagonal", kSmallest, {}}, {}, {}}}, 1},
    {"random", PatternKind::random, false, {{{"n", 0, {}}, {"size", 1, 64}, {"seed", 0, 0}}}, 3},
};

const Form& form_of(PatternKind kind) {
  return *std::ranges::find_if(kForms, [&](const Form& form) { return form.kind == kind; });
}

std::string names() {
  std::string out;
  for (const Form& form : kForms) out += text(out.empty() ? "" : ", ", form.name);
  return out;
}

std::string text_of(const PatternNode& node) {
  std::string out;
  if (!node.parts.empty()) {
    const bool both = node.kind == PatternKind::both;
    for (const auto& part : node.parts) {
      if (!out.empty()) out += both ? " & " : " | ";
      out += both && part->kind == PatternKind::either ? text("(", text_of(*part), ")") : text_of(*part);
    }
    return out;
  }
  const Form& form = form_of(node.kind);
  for (std::size_t k = 0; k < node.numbers.size(); ++k) {
    if (node.kind == PatternKind::local && k == 1 && node.numbers[0] == node.numbers[1]) continue;
    const bool named = !form.set && form.numbers[k].usual.has_value();
    if (named && node.numbers[k] == *form.numbers[k].usual) continue;
    if (!out.empty()) out += ", ";
    if (named) out += text(form.numbers[k].name, "=");
    out += std::to_string(node.numbers[k]);
  }
  return text(form.name, "(", out, ")");
}

using Node = std::shared_ptr<const PatternNode>;

class Parser {
 public:
  explicit Parser(std::string_view all) : all_(all) {}

  Node whole() {
    Node node = either();
    if (at_ < all_.size()) {
      refuse(all_[at_] == ')' ? "there is no '(' to this one" : "expected '|', '&' or the end here");
    }
    return node;
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw Error(text("[patterns] ", in_quotes(all_), ", character ", at_ + 1, ": ", parts...));
  }
  void skip() {
    while (at_ < all_.size() && (all_[at_] == ' ' || all_[at_] == '\t' || all_[at_] == '\n')) ++at_;
  }
  bool take(char wanted) {
    skip();
    if (at_ == all_.size() || all_[at_] != wanted) return false;
    ++at_;
    skip();
    return true;
  }
  std::string_view word() {
    skip();
    const std::size_t begin = at_;
    const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
    while (at_ < all_.size() && is_letter(all_[at_])) ++at_;
    return all_.substr(begin, at_ - begin);
  }

  // Parts joined by `sign`; those of the same kind in parentheses are parts themselves.
  template <class Part>
  Node joined(PatternKind kind, char sign, const Part& part) {
    Node first = part();
    if (!take(sign)) return first;
    PatternNode node{.kind = kind, .numbers = {}, .parts = {}};
    const auto add = [&](const Node& one) {
      if (one->kind == kind) {
        node.parts.insert(node.parts.end(), one->parts.begin(), one->parts.end());
      } else {
        node.parts.push_back(one);
      }
    };
    add(first);
    do add(part());
    while (take(sign));
    return std::make_shared<PatternNode>(std::move(node));
  }
  Node either() {
    return joined(PatternKind::either, '|', [&] { return both(); });
  }
  Node both() {
    return joined(PatternKind::both, '&', [&] { return one(); });
  }

  Node one() {
    if (take('(')) {
      if (++depth_ > kDeepest) refuse("parentheses are nested more than ", kDeepest, " deep");
      Node node = either();
      if (!take(')')) refuse("expected ')' here");
      --depth_;
      return node;
    }
    const std::size_t begin = at_;
    const std::string_view name = word();
    if (name.empty()) refuse("expected a pattern here: ", names(), ", or '('");
    const auto form = std::ranges::find_if(kForms, [&](const Form& each) { return name == each.name; });
    if (form == std::end(kForms)) {
      at_ = begin;
      refuse("there is no pattern '", name, "'; there are ", names());
    }
    if (!take('(')) refuse("expected '(' and the numbers of ", form->name, " here");
    return std::make_shared<PatternNode>(PatternNode{form->kind, form->set ? set(*form) : numbers(*form), {}});
  }

  std::int64_t number(const Form& form, const Number& of) {
    skip();
    const std::size_t begin = at_;
    if (at_ < all_.size() && all_[at_] == '-') ++at_;
    while (at_ < all_.size() && all_[at_] >= '0' && all_[at_] <= '9') ++at_;
    const std::string_view digits = all_.substr(begin, at_ - begin);
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error == std::errc::invalid_argument) {
      at_ = begin;
      refuse("expected ", of.name, " of ", form.name, " here, an integer");
    }
    if (error != std::errc{} || value < of.least || value > kLargest) {
      at_ = begin;
      refuse(of.name, " of ", form.name, " is ", digits, ": it must be from ", of.least, " to ", kLargest);
    }
    skip();
    return value;
  }

  std::vector<std::int64_t> set(const Form& form) {
    std::vector<std::int64_t> out;
    do out.push_back(number(form, form.numbers[0]));
    while (take(','));
    if (!take(')')) refuse("expected ',' or ')' here");
    std::ranges::sort(out);
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out;
  }

  std::vector<std::int64_t> numbers(const Form& form) {
    std::array<std::optional<std::int64_t>, 3> found;
    std::size_t next = 0;
    bool named = false;
    do {
      skip();
      std::size_t which = next;
      const std::size_t begin = at_;
      if (const std::string_view name = word(); !name.empty()) {
        which = 0;
        while (which < form.count && (name != form.numbers[which].name)) ++which;
        if (which == form.count) at_ = begin, refuse(form.name, " has no '", name, "'");
        if (!take('=')) refuse("expected '=' and ", name, " of ", form.name, " here");
        if (found[which]) at_ = begin, refuse(name, " of ", form.name, " is given twice");
        named = true;
      } else if (named && at_ < all_.size() && all_[at_] != ')') {
        refuse("a number without a name is behind one that has one");
      } else if (which == form.count) {
        refuse(form.name, " has no more than ", form.count, form.count == 1 ? " number" : " numbers");
      }
      found[which] = number(form, form.numbers[which]);
      next = which + 1;
    } while (take(','));
    if (!take(')')) refuse("expected ',' or ')' here");
    if (form.kind == PatternKind::local && !found[1]) found[1] = found[0];
    std::vector<std::int64_t> out;
    for (std::size_t k = 0; k < form.count; ++k) {
      const std::optional<std::int64_t> value = found[k] ? found[k] : form.numbers[k].usual;
      if (!value) refuse(form.numbers[k].name, " of ", form.name, " is missing");
      out.push_back(*value);
    }
    return out;
  }

  std::string_view all_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

Pattern::Pattern(std::shared_ptr<const PatternNode> node) : node_(std::move(node)), text_(text_of(*node_)) {}

Pattern Pattern::parse(std::string_view expression) { return Pattern(Parser(expression).whole()); }

}  // namespace heddle
