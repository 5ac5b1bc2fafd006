// Pooled keys and the choice of blocks, the yardstick: each formula of include/heddle/nsa.h in doubles, as it stands
// there.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/pool.h"
#include "problem/select_blocks.h"

namespace heddle::reference {

// Contiguous, of pooled's shape and of x's.
std::vector<double> pool_keys(const PoolProblem& p);
std::vector<double> pool_keys_backward(const PoolBackwardProblem& p);

// p_slc of row i of sequence b for each block that a seen pooled key touches.
std::vector<double> block_scores(const SelectProblem& p, std::int64_t b, std::int64_t i, std::int64_t kv_head);
// Of those scores, of a row at position t.
std::vector<std::int32_t> chosen_blocks(const SelectProblem& p, const std::vector<double>& scores, std::int64_t t);

extern const PoolKernel kPoolKeys;
extern const PoolBackwardKernel kPoolKeysBackward;
extern const SelectKernel kSelectBlocks;

}  // namespace heddle::reference
