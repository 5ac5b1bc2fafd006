// Names from untrusted files, made fit for an error message.
#pragma once

#include <string>
#include <string_view>

namespace heddle {

// 'name', with control characters replaced by '?' and cut after 80 bytes.
inline std::string in_quotes(std::string_view name) {
  constexpr std::size_t kShown = 80;
  std::string out = "'";
  for (const char c : name.substr(0, kShown)) out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return out + (name.size() > kShown ? "...'" : "'");
}

}  // namespace heddle
