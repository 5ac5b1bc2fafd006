#include "distributed/agreement.h"

#include <algorithm>

namespace heddle::distributed {

void Agreement::require(const Words& words) {
  std::vector<std::int64_t> own;
  for (const auto& [what, value] : words) own.push_back(value);
  if (std::ranges::find(agreed_, own) != agreed_.end()) return;
  const auto ranks = static_cast<std::size_t>(communicator_.size());
  std::vector<std::int64_t> all(ranks * own.size());
  std::vector<std::span<std::byte>> parts;
  for (std::size_t r = 0; r < ranks; ++r) {
    parts.push_back(std::as_writable_bytes(std::span(all).subspan(r * own.size(), own.size())));
  }
  communicator_.all_gather(std::as_bytes(std::span<const std::int64_t>(own)), parts, "plans compared");
  for (std::size_t r = 1; r < ranks; ++r) {
    for (std::size_t n = 0; n < own.size(); ++n) {
      const std::int64_t first = all[n], here = all[r * own.size() + n];
      Check("distributed")
          .require(first == here, "ranks do not agree: ", words[n].first, " is ", first, " on rank 0 and ", here,
                   " on rank ", r);
    }
  }
  agreed_.push_back(std::move(own));
}

}  // namespace heddle::distributed
