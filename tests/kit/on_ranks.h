// Ranks as threads of one process.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "heddle/distributed.h"

namespace heddle::kit {

// What one rank does, on all of them at once. What it throws is kept for each.
std::vector<std::string> on_ranks(int ranks, std::chrono::milliseconds timeout,
                                  const std::function<void(distributed::Communicator&)>& body);

}  // namespace heddle::kit
