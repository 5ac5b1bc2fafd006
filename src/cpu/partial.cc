#include "cpu/partial.h"

#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/plan.h"

namespace heddle::cpu {
namespace {

// Elements that a task should at least read: below this the hand-over costs more than the work.
constexpr std::int64_t kTaskElements = std::int64_t{1} << 14;

std::int64_t rows_of_task(const MergeProblem& p) {
  const std::int64_t elements = std::max<std::int64_t>(1, p.H * p.Dv * static_cast<std::int64_t>(p.partials.size()));
  return std::max<std::int64_t>(1, kTaskElements / elements);
}

// Calls rows(begin, end) for all rows of the problem, in tasks of whole rows.
template <class Rows>
void for_each_rows(const MergeProblem& p, Executor& executor, const Rows& rows) {
  const std::int64_t count = p.B * p.S, chunk = rows_of_task(p);
  parallel_for(executor, ceil_div(count, chunk),
               [&](std::int64_t task, int) { rows(task * chunk, std::min(count, (task + 1) * chunk)); });
}

void merge(const MergeProblem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  for_each_rows(p, *runtime.executor, [&](std::int64_t begin, std::int64_t end) { k.merge_partials(p, begin, end); });
}

void merge_backward(const MergeBackwardProblem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  const bool any = std::ranges::any_of(p.gradients, [](const Partial& x) { return x.o.given() || x.lse.given(); });
  if (any) {
    for_each_rows(p, *runtime.executor,
                  [&](std::int64_t begin, std::int64_t end) { k.merge_partials_backward(p, begin, end); });
  }
  if (p.dsink) {
    parallel_for(*runtime.executor, p.H, [&](std::int64_t h, int) { k.merge_sink_gradient(p, h); });
  }
}

// Bytes a second of one thread, about, of float32 partials in memory; the gradients read and write each. Nothing is
// compared by it.
constexpr double kMerged = 20e9;

std::string in_tasks(const MergeProblem& p, int workers) {
  return text(kernels().name, ", tasks of ", rows_of_task(p), " rows, ", workers,
              workers == 1 ? " thread" : " threads");
}

}  // namespace

const MergeKernel kMergeAttention = {
    .name = "cpu",
    .method = "merge",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = [](const MergeProblem& p, int workers) { return p.bytes() / (kMerged * workers); },
    .workspace = no_workspace,
    .launch = merge,
    .describe = in_tasks,
};

const MergeBackwardKernel kMergeAttentionBackward = {
    .name = "cpu",
    .method = "merge",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = [](const MergeBackwardProblem& p, int workers) { return 2 * p.bytes() / (kMerged * workers); },
    .workspace = no_workspace,
    .launch = merge_backward,
    .describe = [](const MergeBackwardProblem& p, int workers) { return in_tasks(p, workers); },
};

}  // namespace heddle::cpu
