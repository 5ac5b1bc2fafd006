// Launches pooling of keys and its gradient on the CPU, in tasks of whole rows.
#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/nsa.h"
#include "cpu/plan.h"

namespace heddle::cpu {
namespace {

// Elements that a task should at least read: below this the hand-over costs more than the work.
constexpr std::int64_t kTaskElements = std::int64_t{1} << 14;

// Rows of a task, of which each is made of `read` rows.
std::int64_t rows_of_task(const PoolProblem& p, std::int64_t read) {
  return std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(1, p.H * p.D * read));
}
std::int64_t pooled_of_task(const PoolProblem& p) { return rows_of_task(p, p.block); }
std::int64_t keys_of_task(const PoolProblem& p) { return rows_of_task(p, ceil_div(p.block, p.stride)); }

template <class Rows>
void for_each_rows(Executor& executor, std::int64_t count, std::int64_t chunk, const Rows& rows) {
  parallel_for(executor, ceil_div(count, chunk),
               [&](std::int64_t task, int) { rows(task * chunk, std::min(count, (task + 1) * chunk)); });
}

// Bytes a second of one thread, about. Nothing is compared by it.
constexpr double kPooled = 10e9;

std::string in_tasks(std::int64_t rows, int workers) {
  return text(kernels().name, ", tasks of ", rows, " rows, ", workers, workers == 1 ? " thread" : " threads");
}

}  // namespace

const PoolKernel kPoolKeys = {
    .name = "cpu",
    .method = "pool",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = [](const PoolProblem& p, int workers) { return p.bytes() / (kPooled * workers); },
    .workspace = no_workspace,
    .launch =
        [](const PoolProblem& p, const Runtime& runtime) {
          const Kernels& k = kernels();
          for_each_rows(*runtime.executor, p.batches() * p.written_rows(), pooled_of_task(p),
                        [&](std::int64_t begin, std::int64_t end) { k.pool_keys(p, begin, end); });
        },
    .describe = [](const PoolProblem& p, int workers) { return in_tasks(pooled_of_task(p), workers); },
};

const PoolBackwardKernel kPoolKeysBackward = {
    .name = "cpu",
    .method = "pool",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = [](const PoolBackwardProblem& p, int workers) { return p.bytes() / (kPooled * workers); },
    .workspace = no_workspace,
    .launch =
        [](const PoolBackwardProblem& p, const Runtime& runtime) {
          const Kernels& k = kernels();
          for_each_rows(*runtime.executor, p.batches() * p.S, keys_of_task(p),
                        [&](std::int64_t begin, std::int64_t end) { k.pool_keys_backward(p, begin, end); });
        },
    .describe = [](const PoolBackwardProblem& p, int workers) { return in_tasks(keys_of_task(p), workers); },
};

}  // namespace heddle::cpu
