// The processes of the MPI job that a test runs in: all run all tests, one after the other.
#pragma once

#include "heddle/distributed.h"

namespace heddle::kit::over_ranks {

// Of all processes; made by main().
distributed::Communicator& job();

}  // namespace heddle::kit::over_ranks
