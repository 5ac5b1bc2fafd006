// JSON that others wrote, which every reader takes from here. nlohmann's parser and destructor keep their own stacks,
// but to copy, compare or write a value recurses, and a deep one ends the process: depth is bounded before anything is
// parsed.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace heddle {

inline constexpr int kMaxJsonDepth = 64;
// Of files: configurations, and headers and indices, which have a line for each tensor.
inline constexpr std::size_t kMaxConfigBytes = std::size_t{16} << 20;
inline constexpr std::size_t kMaxIndexBytes = 100'000'000;

// Where arrays and objects first lie more than kMaxJsonDepth deep in each other; npos where they do not.
std::size_t json_too_deep_at(std::string_view content);
// Throws Error, "[operation] source ...", where they do.
void require_shallow_json(std::string_view operation, const std::string& source, std::string_view content);

// A discarded value, which is no object, where the content is not JSON. Throws Error where it is too deep, and for a
// file that is too long; RuntimeError as read_file does. Objects are sorted by key: where they are kept in their order,
// each key is looked for among all before it.
nlohmann::json parse_json(std::string_view operation, const std::string& source, std::string_view content);
nlohmann::json read_json(std::string_view operation, const std::string& path, std::size_t max_bytes);

}  // namespace heddle
