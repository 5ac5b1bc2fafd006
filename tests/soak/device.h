// What the soak does on the GPU itself: random tensors, counts of rows that differ, and copies. Nothing here is shared
// with the library's kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/tensor.h"

namespace heddle::soak {

// Rows that were found wrong. On the GPU while it is counted.
struct Tally {
  unsigned long long rows = 0;
  unsigned long long first = ~0ull;  // the first of them
  float worst = 0.0f;                // error over what is allowed, or 0 where bits are compared
};

// Normal numbers of this deviation, the same for a seed wherever they are made. f32, f16, bf16 or f8e4m3. On the
// default stream, as all that has no stream here.
void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed, float deviation = 1.0f);

// Counts rows of `row_bytes` (a multiple of 4) that are not the same.
void count_other_rows(const void* x, const void* y, std::int64_t rows, std::int64_t row_bytes, Tally* tally,
                      void* stream);

// Counts rows of `width` numbers whose distance from `expected` is not within `tolerance` times what both the row and
// the average row have for a length. Where an infinity is expected, it must be there. NaN never passes.
void count_far_rows(const void* x, DType dtype, const double* expected, std::int64_t rows, std::int64_t width,
                    double tolerance, double average, Tally* tally, void* stream);
// The root of the mean square of `count` numbers, infinities left out.
double root_mean_square(const double* x, std::int64_t count);

// Rows of sequences [B, rows, heads, size]: row i of sequence b lies in slot first[b] + i of its `slots`, or where its
// pages have that slot.
struct SlotRows {
  void* data;
  DType dtype;
  int B, rows, heads, size, slots;
  const int* first = nullptr;  // [B]; null: 0
  const int* page_table = nullptr;
  int page_size = 0, max_pages = 0;
};
// Writes rows that lie side by side to their slots, rounded to nearest.
void write_rows(const double* rows, const SlotRows& to);
// On the stream: the slots' rows side by side; and this byte in all of them.
void read_rows(const SlotRows& from, void* rows, void* stream);
void fill_rows(const SlotRows& rows, int byte, void* stream);

// On the stream.
void fill_bytes(void* to, int value, std::size_t bytes, void* stream);
void copy_bytes(void* to, const void* from, std::size_t bytes, void* stream);

// Waits for the device; throws with what went wrong on it.
void finish();

}  // namespace heddle::soak
