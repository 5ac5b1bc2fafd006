// The workspace of a call on the CPU: rows between products, what attention takes, and scratch of each worker.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/parallel.h"
#include "model/linear.h"
#include "model/places.h"

namespace heddle {

// Where they lie. Rows are as many as whole steps of linear layers hold.
struct CpuRowPlaces {
  std::size_t x = 0;                 // [rows, hidden]: the residual stream
  std::size_t qkv = 0, context = 0;  // [rows, qkv], [rows, hidden]: attention's operands and output
  std::size_t attention = 0, attention_bytes = 0;
  std::size_t workers = 0, worker_bytes = 0;  // of each worker, one behind the other
  std::size_t bytes = 0;

  CpuRowPlaces() = default;
  CpuRowPlaces(const RowSizes& sizes, std::size_t bytes_of_attention) : attention_bytes(bytes_of_attention) {
    CpuPlaces places;
    const auto take = [&](std::int64_t columns) {
      return places.take(static_cast<std::size_t>(whole_steps(sizes.total) * columns) * sizes.element);
    };
    x = take(sizes.hidden);
    qkv = take(sizes.qkv);
    context = take(sizes.hidden);
    attention = places.take(attention_bytes);
    workers = bytes = places.bytes();
  }
  void deal_out(std::size_t bytes_of_worker, int count) {
    worker_bytes = bytes_of_worker;
    bytes = workers + worker_bytes * static_cast<std::size_t>(count);
  }
};

// Calls block(first row, rows, worker) over all rows. Few rows are split finer, to keep every worker busy.
template <class Block>
void over_rows(Executor& executor, std::int64_t total, const Block& block) {
  const std::int64_t step = total >= kLinearRows * executor.workers() ? kLinearRows : kLinearRowStep;
  parallel_for(executor, (total + step - 1) / step, [&](std::int64_t index, int worker) {
    block(index * step, std::min(step, total - index * step), worker);
  });
}

}  // namespace heddle
