// Values that have names, members of an enumeration mostly: one table of each kind, read both ways.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"

namespace heddle {

template <class Value>
struct NamedValue {
  const char* name;
  Value value;
};

// The value of that name. Throws Error "[operation] what is 'name': it must be one of ...".
template <class Value, std::size_t kCount>
Value value_named(const NamedValue<Value> (&table)[kCount], std::string_view name, std::string_view operation,
                  std::string_view what) {
  std::string known;
  for (const NamedValue<Value>& named : table) {
    if (name == named.name) return named.value;
    known += (known.empty() ? "" : ", ") + std::string(named.name);
  }
  throw Error(text("[", operation, "] ", what, " is '", name, "': it must be one of ", known));
}

template <class Value, std::size_t kCount>
std::vector<std::string> names_in(const NamedValue<Value> (&table)[kCount]) {
  std::vector<std::string> names;
  for (const NamedValue<Value>& named : table) names.emplace_back(named.name);
  return names;
}

template <class Value, std::size_t kCount>
const char* name_in(const NamedValue<Value> (&table)[kCount], Value value) {
  for (const NamedValue<Value>& named : table) {
    if (value == named.value) return named.name;
  }
  return "unknown";
}

}  // namespace heddle
