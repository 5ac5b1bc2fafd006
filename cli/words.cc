#include "words.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <numeric>

namespace heddle::cli {
namespace {

// Letters count as the same in capitals.
bool same(char a, char b) {
  return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
}

std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + !same(a[i - 1], b[j - 1])});
      const bool exchanged = i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]);
      if (exchanged) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = last;
    last = row;
  }
  return last[b.size()];
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& names) {
  constexpr std::size_t kTypos = 2;
  std::string found;
  std::size_t fewest = kTypos + 1;
  for (const std::string& name : names) {
    const std::size_t count = edits(word, name);
    if (count >= fewest || 2 * count >= name.size()) continue;
    fewest = count;
    found = name;
  }
  return found;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& names) {
  const std::string name = nearest(word, names);
  return name.empty() ? "" : "; did you mean " + name + "?";
}

}  // namespace heddle::cli
