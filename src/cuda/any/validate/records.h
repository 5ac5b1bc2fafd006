// Where what is found on each stream is kept.
#pragma once

#include <string_view>

#include "problem/index_record.h"

namespace heddle::cuda {

struct StreamRecord {
  IndexRecord* record;  // in page-locked memory, at one address for the host and all GPUs
  int number;           // below kMostStreams
};

// The stream's, of the current GPU; its first call makes it. Works while the stream is captured.
StreamRecord record_of(std::string_view operation, void* stream);

}  // namespace heddle::cuda
