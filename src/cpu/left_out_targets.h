// What a build lacks that this processor would rather run.
#pragma once

#include <string>
#include <vector>

namespace heddle::cpu {

// Targets that this processor has, better than any that is built in for it; best first.
std::vector<std::string> better_targets_left_out();

}  // namespace heddle::cpu
