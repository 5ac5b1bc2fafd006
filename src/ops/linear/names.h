// Names of the members of a linear layer's enumerations, as activation_named() and its kin take them.
#pragma once

#include <string>
#include <vector>

namespace heddle {

std::vector<std::string> activation_names();
std::vector<std::string> norm_names();
std::vector<std::string> weight_order_names();

}  // namespace heddle
