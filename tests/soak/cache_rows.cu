// Rows of caches: where they lie, and how they are rotated.
#include "soak/device.h"
#include "soak/elements.cuh"
#include "soak/reference.h"

namespace heddle::soak {
namespace {

constexpr int kBlocks = 512, kThreads = 256;

// Element n of all rows side by side, in the memory of the slots.
__device__ std::int64_t place_of(const SlotRows& r, std::int64_t n) {
  const std::int64_t width = std::int64_t{r.heads} * r.size, row = n / width;
  const int b = static_cast<int>(row / r.rows),
            slot = (r.first != nullptr ? r.first[b] : 0) + static_cast<int>(row % r.rows);
  const std::int64_t at =
      r.page_table == nullptr
          ? std::int64_t{b} * r.slots + slot
          : std::int64_t{r.page_table[b * r.max_pages + slot / r.page_size]} * r.page_size + slot % r.page_size;
  return at * width + n % width;
}

std::int64_t elements(const SlotRows& r) { return std::int64_t{r.B} * r.rows * r.heads * r.size; }

__global__ void write_kernel(const double* rows, const SlotRows to, std::int64_t count) {
  for_each(count, [&](std::int64_t n) { store(to.data, to.dtype, place_of(to, n), rows[n]); });
}

// Of elements of so many bytes.
__global__ void read_kernel(const SlotRows from, std::byte* rows, std::int64_t count, int bytes) {
  for_each(count, [&](std::int64_t n) {
    const std::byte* const at = static_cast<const std::byte*>(from.data) + place_of(from, n) * bytes;
    for (int byte = 0; byte < bytes; ++byte) rows[n * bytes + byte] = at[byte];
  });
}

__global__ void fill_kernel(const SlotRows rows, std::byte value, std::int64_t count, int bytes) {
  for_each(count, [&](std::int64_t n) {
    std::byte* const at = static_cast<std::byte*>(rows.data) + place_of(rows, n) * bytes;
    for (int byte = 0; byte < bytes; ++byte) at[byte] = value;
  });
}

__global__ void rotate_kernel(const RotatedRows r, const Rotation rotation, std::int64_t count, double* out) {
  for_each(count, [&](std::int64_t n) {
    const std::int64_t row = n / r.D;
    const int d = static_cast<int>(n % r.D), half = rotation.dims / 2;
    out[n] = load(r.x, r.dtype, n);
    if (d >= rotation.dims) return;
    const std::int64_t in_batch = row / r.H;
    const int b = static_cast<int>(in_batch / r.S), i = static_cast<int>(in_batch % r.S);
    const int turn = rotation.pairs ? d / 2 : d % half;
    const bool second = rotation.pairs ? d % 2 == 1 : d >= half;
    const int other = rotation.pairs ? d ^ 1 : (d + half) % rotation.dims;
    const std::int64_t at = std::int64_t{r.first[b] + (r.together ? 0 : i)} * half + turn;
    const double partner = load(r.x, r.dtype, row * r.D + other);
    out[n] = out[n] * static_cast<double>(rotation.cos[at]) +
             (second ? partner : -partner) * static_cast<double>(rotation.sin[at]);
  });
}

__global__ void scales_kernel(double* rows, std::int64_t count, int width, double* scales) {
  for_each(count, [&](std::int64_t row) {
    double largest = 0;
    for (int n = 0; n < width; ++n) largest = fmax(largest, fabs(rows[row * width + n]));
    scales[row] = largest / 448;
    for (int n = 0; n < width; ++n) rows[row * width + n] /= scales[row];
  });
}

}  // namespace

void write_rows(const double* rows, const SlotRows& to) {
  write_kernel<<<kBlocks, kThreads>>>(rows, to, elements(to));
  check(cudaGetLastError());
}

void read_rows(const SlotRows& from, void* rows, void* stream) {
  read_kernel<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      from, static_cast<std::byte*>(rows), elements(from), static_cast<int>(size_of(from.dtype)));
  check(cudaGetLastError());
}

void fill_rows(const SlotRows& rows, int byte, void* stream) {
  fill_kernel<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      rows, static_cast<std::byte>(byte), elements(rows), static_cast<int>(size_of(rows.dtype)));
  check(cudaGetLastError());
}

void reference_rotate(const RotatedRows& r, const Rotation& rotation, double* out) {
  rotate_kernel<<<kBlocks, kThreads>>>(r, rotation, std::int64_t{r.B} * r.S * r.H * r.D, out);
  check(cudaGetLastError());
}

void take_scales(double* rows, std::int64_t count, int width, double* scales) {
  scales_kernel<<<kBlocks, kThreads>>>(rows, count, width, scales);
  check(cudaGetLastError());
}

}  // namespace heddle::soak
