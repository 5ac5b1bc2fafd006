// Merges of partial results and their gradients on the GPU, on `stream`.
#pragma once

#include <cstddef>
#include <string>

#include "problem/partial.h"

namespace heddle::cuda {

// Bytes. Of the forward only where there are more partials than a launch can name.
std::size_t merge_workspace(const MergeProblem& problem);
std::size_t merge_backward_workspace(const MergeBackwardProblem& problem);
void merge_partials(const MergeProblem& problem, void* workspace, void* stream);
void merge_partials_backward(const MergeBackwardProblem& problem, void* workspace, void* stream);
// "16 threads for a row of a head, in pieces of 16 bytes"
std::string describe_merge(const MergeProblem& problem);

}  // namespace heddle::cuda
