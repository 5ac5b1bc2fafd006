// Names of the rules for scales, as rule_named() takes them.
#pragma once

#include <string>
#include <vector>

namespace heddle::lowbit {

std::vector<std::string> rule_names();

}  // namespace heddle::lowbit
