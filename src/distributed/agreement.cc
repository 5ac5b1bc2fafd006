#include "distributed/agreement.h"

#include <algorithm>
#include <bit>
#include <cstdio>

namespace heddle::distributed {
namespace {

std::string shown(std::int64_t value, Agreement::Shown as) {
  if (as == Agreement::Shown::number) return text(value);
  if (as == Agreement::Shown::f32) {
    return text(static_cast<double>(std::bit_cast<float>(static_cast<std::int32_t>(value))));
  }
  return digest_text(static_cast<std::uint64_t>(value));
}

}  // namespace

std::string digest_text(std::uint64_t digest) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(digest));
  return digits;
}

void Agreement::require(const std::vector<Word>& words) {
  std::vector<std::int64_t> own;
  for (const Word& word : words) own.push_back(word.value);
  if (std::ranges::find(agreed_, own) != agreed_.end()) return;
  const auto ranks = static_cast<std::size_t>(communicator_.size());
  std::vector<std::int64_t> all(ranks * own.size());
  std::vector<std::span<std::byte>> parts;
  for (std::size_t r = 0; r < ranks; ++r) {
    parts.push_back(std::as_writable_bytes(std::span(all).subspan(r * own.size(), own.size())));
  }
  communicator_.all_gather_on_host(std::as_bytes(std::span<const std::int64_t>(own)), parts, "plans compared");
  for (std::size_t r = 1; r < ranks; ++r) {
    for (std::size_t n = 0; n < own.size(); ++n) {
      const std::int64_t first = all[n], here = all[r * own.size() + n];
      if (first == here) continue;
      throw Error(text("[", communicator_.operation(), "] ranks do not agree: ", words[n].what, " is ",
                       shown(first, words[n].as), " on rank 0 and ", shown(here, words[n].as), " on rank ", r));
    }
  }
  agreed_.push_back(std::move(own));
}

}  // namespace heddle::distributed
