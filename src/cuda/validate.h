// Validate mode: index data checked on the GPU, by one kernel in front of the operation that reads it.
#pragma once

#include <string>

#include "problem/call_indices.h"

namespace heddle::cuda {

// Puts the checks on the stream, of the current GPU. What they find first is kept for the stream until it is taken,
// and hides what is found later. operation: a literal of the host, whose address the GPU only passes on. Throws
// RuntimeError where a stream too many (kMostStreams) has records.
template <class Indices>  // one of problem/call_indices.h
void check_indices(const char* operation, const Indices& indices, void* stream);

constexpr int kMostStreams = 1024;

// Takes what was found on the stream of the current GPU: "[operation] sentence", or nothing. Does not wait.
std::string take_bad_index(void* stream);
// The same of all streams of a GPU, a line each.
std::string take_bad_indices(int gpu);
// Waits for the stream.
void wait_for(void* stream);

}  // namespace heddle::cuda
