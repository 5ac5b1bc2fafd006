// JSON that is nested as deep as only a hostile file is: where reading it recurses, the process ends.
#pragma once

#include <string>

namespace heddle::test {

inline constexpr int kHostileDepth = 300'000;

inline std::string nested_arrays(int depth = kHostileDepth) {
  const auto count = static_cast<std::size_t>(depth);
  return std::string(count, '[') + std::string(count, ']');
}
inline std::string nested_objects(int depth = kHostileDepth) {
  std::string out;
  for (int i = 0; i < depth; ++i) out += R"({"a":)";
  return out + "0" + std::string(static_cast<std::size_t>(depth), '}');
}

}  // namespace heddle::test
