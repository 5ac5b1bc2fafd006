// What the host decides about a call before its launch; the kernels of this family share it.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/attention/params.h"
#include "problem/attention.h"

namespace heddle::cuda::sm90::attention {

struct Plan {
  int pack, positions, units, q_tiles, section, section_rows;
  bool dynamic;  // tiles are dealt out while the kernel runs: a counter in the workspace
};

// Empty if q, k, v and o lie as the tensor memory accelerator and 16-byte stores need them, and their tiles can be
// counted.
Refusal refuse_layout(const AttentionProblem& p);

// Empty if a piece of a longer problem has positions that 32 bits can tell apart, and no key between the windows of two
// rows that neither meets: a walk does not know of it, and its value would not be cleared.
Refusal refuse_positions(const AttentionProblem& p);

// consumers: warpgroups of 64 query rows.
Plan make_plan(const AttentionProblem& p, int consumers);
// With so many heads of a group to a tile.
Plan plan_with(const AttentionProblem& p, int consumers, int pack, bool dynamic);

// All but score options, scales and next_tile.
void fill(Params& params, const AttentionProblem& p, const Plan& plan, int tile_k);

// The counter that tiles are dealt out by, set to 0 on the stream.
int* new_counter(void* memory, cudaStream_t stream);

}  // namespace heddle::cuda::sm90::attention
