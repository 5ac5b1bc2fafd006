#include "cpu/partial.h"

#include <algorithm>

#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/plan.h"

namespace heddle::cpu {
namespace {

// Elements that a task should at least read: below this the hand-over costs more than the work.
constexpr std::int64_t kTaskElements = std::int64_t{1} << 14;

// Calls rows(begin, end) for all rows of the problem, in tasks of whole rows.
template <class Rows>
void for_each_rows(const MergeProblem& p, Executor& executor, const Rows& rows) {
  const std::int64_t count = p.B * p.S;
  const std::int64_t elements = std::max<std::int64_t>(1, p.H * p.Dv * static_cast<std::int64_t>(p.partials.size()));
  const std::int64_t chunk = std::max<std::int64_t>(1, kTaskElements / elements);
  parallel_for(executor, ceil_div(count, chunk),
               [&](std::int64_t task, int) { rows(task * chunk, std::min(count, (task + 1) * chunk)); });
}

}  // namespace

void merge_attention(const MergeProblem& p, Executor& executor) {
  const Kernels& k = kernels();
  for_each_rows(p, executor, [&](std::int64_t begin, std::int64_t end) { k.merge_partials(p, begin, end); });
}

void merge_attention_backward(const MergeBackwardProblem& p, Executor& executor) {
  const Kernels& k = kernels();
  const bool any = std::ranges::any_of(p.gradients, [](const Partial& x) { return x.o.given() || x.lse.given(); });
  if (any) {
    for_each_rows(p, executor, [&](std::int64_t begin, std::int64_t end) { k.merge_partials_backward(p, begin, end); });
  }
  if (p.dsink) parallel_for(executor, p.H, [&](std::int64_t h, int) { k.merge_sink_gradient(p, h); });
}

}  // namespace heddle::cpu
