#include "core/json.h"

#include "core/check.h"
#include "core/files.h"

namespace heddle {

// The parser would tell depth too, to a callback, but looks then through the whole array behind each object in it. As
// far as the parser comes, it and this agree on what is inside a string; behind its first error nothing is parsed.
std::size_t json_too_deep_at(std::string_view content) {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < content.size(); ++i) {
    const char c = content[i];
    if (c == '"') quoted = !quoted;
    if (quoted) {
      if (c == '\\') ++i;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) return i;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return std::string_view::npos;
}

void require_shallow_json(std::string_view operation, const std::string& source, std::string_view content) {
  const std::size_t at = json_too_deep_at(content);
  Check(operation).require(at == std::string_view::npos, source, " nests arrays and objects more than ", kMaxJsonDepth,
                           " deep, at byte ", at);
}

nlohmann::json parse_json(std::string_view operation, const std::string& source, std::string_view content) {
  require_shallow_json(operation, source, content);
  return nlohmann::json::parse(content.begin(), content.end(), nullptr, /*allow_exceptions=*/false);
}

nlohmann::json read_json(std::string_view operation, const std::string& path, std::size_t max_bytes) {
  return parse_json(operation, path, read_file(operation, path, max_bytes));
}

}  // namespace heddle
