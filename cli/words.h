// Words that a person typed and nobody knows, and those that were probably meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace heddle::cli {

// The name of the fewest edits from `word`, of which there may be two: letters inserted, removed, replaced or exchanged
// with their neighbours. "" if there is none; a name of which that is half is none.
std::string nearest(std::string_view word, const std::vector<std::string>& names);

// "; did you mean NAME?", or nothing if there is none near.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& names);

}  // namespace heddle::cli
