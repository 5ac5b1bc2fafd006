// Matrix products of a warpgroup (Hopper): D[64, N] (+)= A[64, 16] B[16, N], fp32 accumulators; 32 instead of 16 for
// e4m3.
//
// Thread t of the warpgroup holds, with row = 16 (t / 32) + (t % 32) / 4 and column = 8 j + 2 (t % 4):
//   d[4 j + 0], d[4 j + 1]   (row, column), (row, column + 1)
//   d[4 j + 2], d[4 j + 3]   (row + 8, column), (row + 8, column + 1)
// A in registers: a0 (row, k), a1 (row + 8, k), a2 (row, k + 8), a3 (row + 8, k + 8) with k = 2 (t % 4), two elements
// each: so the accumulators of one product, rounded and packed in pairs, are the A of the next.
//
// e4m3: a0 (row, k), a1 (row + 8, k), a2 (row, k + 16), a3 (row + 8, k + 16) with k = 4 (t % 4), four elements each:
// not the accumulators' order. Sums keep about 14 bits: every addition truncates to 2^-13 of the larger operand or so.
#pragma once

#include <cuda_fp8.h>

#include "cuda/common/ptx/memory.cuh"

namespace heddle::cuda {

// Accesses to accumulator registers before this line happen before the products issued after it.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the newest `kPending` committed groups are done.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same as wgmma_wait<0>(). Its text differs, so that the compiler does not merge the waits of two branches into
// one.
__device__ inline void wgmma_wait_without_rescale() {
  asm volatile("wgmma.wait_group.sync.aligned 0;  // nothing to rescale" ::: "memory");
}

// Keeps the compiler from moving uses of these registers across this line: it does not know that an asynchronous
// product still writes them.
template <int kCount>
__device__ inline void keep(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Operand in shared memory with the 128-byte swizzle: panels of 64 16-bit elements (128 bytes), one row after the
// other, each panel aligned to 1024 bytes. The swizzle repeats every 8 rows.
//   K-major (rows are M or N, the 64 elements run along K): step along K inside a panel by 32 bytes for 16 elements.
//   MN-major (rows run along K, the 64 elements along M or N): `panel_bytes` is the distance between panels; step along
//   K by 16 rows, 2048 bytes.
class Swizzled128 {
 public:
  __device__ explicit Swizzled128(const void* shared, std::uint32_t panel_bytes = 16)
      : low_((ptx::shared_address(shared) & 0x3FFFF) >> 4 | panel_bytes >> 4 << 16) {}
  // The descriptor of the operand that starts `bytes` further on.
  __device__ std::uint64_t at(std::uint32_t bytes) const {
    constexpr std::uint32_t kHigh = 1u << 30 | 1024 >> 4;  // 128-byte swizzle; distance between groups of 8 rows
    std::uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low_ + (bytes >> 4)), "r"(kHigh));
    return descriptor;
  }

 private:
  std::uint32_t low_;
};

// K-major operand of 16 columns without a swizzle, [2][rows][8] 16-bit elements.
__device__ inline std::uint64_t unswizzled_columns(const void* shared, std::uint32_t rows) {
  std::uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(descriptor)
      : "r"((ptx::shared_address(shared) & 0x3FFFF) >> 4 | rows << 16), "r"(8 * 16 >> 4));
  return descriptor;
}

// Products with element type T. A from shared memory is K-major; B is MN-major if kTransposedB, else K-major. With
// accumulate = false, D is overwritten.
template <class T, int kN>
struct Wgmma;

#define HEDDLE_N0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HEDDLE_N1 HEDDLE_N0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define HEDDLE_N2 HEDDLE_N1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define HEDDLE_N3 HEDDLE_N2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define HEDDLE_N4 HEDDLE_N3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define HEDDLE_N5 HEDDLE_N4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define HEDDLE_N6 HEDDLE_N5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define HEDDLE_N7 HEDDLE_N6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define HEDDLE_N8 HEDDLE_N7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define HEDDLE_N9 HEDDLE_N8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define HEDDLE_N10 HEDDLE_N9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define HEDDLE_N11 HEDDLE_N10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define HEDDLE_N12 HEDDLE_N11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define HEDDLE_N13 HEDDLE_N12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define HEDDLE_N14 HEDDLE_N13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define HEDDLE_N15 HEDDLE_N14 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define HEDDLE_D(i)                                                                                         \
  "+f"(d[8 * (i)]), "+f"(d[8 * (i) + 1]), "+f"(d[8 * (i) + 2]), "+f"(d[8 * (i) + 3]), "+f"(d[8 * (i) + 4]), \
      "+f"(d[8 * (i) + 5]), "+f"(d[8 * (i) + 6]), "+f"(d[8 * (i) + 7])
#define HEDDLE_D0 HEDDLE_D(0)
#define HEDDLE_D1 HEDDLE_D0, HEDDLE_D(1)
#define HEDDLE_D2 HEDDLE_D1, HEDDLE_D(2)
#define HEDDLE_D3 HEDDLE_D2, HEDDLE_D(3)
#define HEDDLE_D4 HEDDLE_D3, HEDDLE_D(4)
#define HEDDLE_D5 HEDDLE_D4, HEDDLE_D(5)
#define HEDDLE_D6 HEDDLE_D5, HEDDLE_D(6)
#define HEDDLE_D7 HEDDLE_D6, HEDDLE_D(7)
#define HEDDLE_D8 HEDDLE_D7, HEDDLE_D(8)
#define HEDDLE_D9 HEDDLE_D8, HEDDLE_D(9)
#define HEDDLE_D10 HEDDLE_D9, HEDDLE_D(10)
#define HEDDLE_D11 HEDDLE_D10, HEDDLE_D(11)
#define HEDDLE_D12 HEDDLE_D11, HEDDLE_D(12)
#define HEDDLE_D13 HEDDLE_D12, HEDDLE_D(13)
#define HEDDLE_D14 HEDDLE_D13, HEDDLE_D(14)
#define HEDDLE_D15 HEDDLE_D14, HEDDLE_D(15)

// Eight columns more: the e4m3 product's row sums.
#define HEDDLE_N3H HEDDLE_N3 ", %32, %33, %34, %35"
#define HEDDLE_N5H HEDDLE_N5 ", %48, %49, %50, %51"
#define HEDDLE_N7H HEDDLE_N7 ", %64, %65, %66, %67"
#define HEDDLE_H(i) "+f"(d[8 * (i)]), "+f"(d[8 * (i) + 1]), "+f"(d[8 * (i) + 2]), "+f"(d[8 * (i) + 3])
#define HEDDLE_D3H HEDDLE_D3, HEDDLE_H(4)
#define HEDDLE_D5H HEDDLE_D5, HEDDLE_H(6)
#define HEDDLE_D7H HEDDLE_D7, HEDDLE_H(8)

// kLast: index of the last group of 8 accumulators, N / 16 - 1. r0...r5: the operands' numbers after the accumulators.
#define HEDDLE_WGMMA(type, name, kWidth, kLast, r0, r1, r2, r3, r4, r5, r6)                                           \
  template <>                                                                                                         \
  struct Wgmma<type, kWidth> {                                                                                        \
    template <bool kTransposedB = false>                                                                              \
    static __device__ inline void shared_shared(float (&d)[kWidth / 2], std::uint64_t a, std::uint64_t b,             \
                                                bool accumulate) {                                                    \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #r2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #kWidth      \
                   "k16.f32." name "." name " {" HEDDLE_N##kLast "}, %" #r0 ", %" #r1 ", p, 1, 1, 0, %" #r3 ";\n}"    \
                   : HEDDLE_D##kLast                                                                                  \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposedB)));         \
    }                                                                                                                 \
    template <bool kTransposedB>                                                                                      \
    static __device__ inline void registers_shared(float (&d)[kWidth / 2], const std::uint32_t (&a)[4],               \
                                                   std::uint64_t b, bool accumulate) {                                \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #r5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #kWidth      \
                   "k16.f32." name "." name " {" HEDDLE_N##kLast "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 \
                                                                 ", p, 1, 1, %" #r6 ";\n}"                            \
                   : HEDDLE_D##kLast                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),           \
                     "n"(static_cast<int>(kTransposedB)));                                                            \
    }                                                                                                                 \
  };
#define HEDDLE_WGMMA_16BIT(...)                    \
  HEDDLE_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__) \
  HEDDLE_WGMMA(__half, "f16", __VA_ARGS__)

// 8-bit operands in shared memory are K-major, all of them.
#define HEDDLE_WGMMA_E4M3(kWidth, kLast, r0, r1, r2, r3, r4, r5)                                                 \
  template <>                                                                                                    \
  struct Wgmma<__nv_fp8_e4m3, kWidth> {                                                                          \
    static __device__ inline void shared_shared(float (&d)[kWidth / 2], std::uint64_t a, std::uint64_t b,        \
                                                bool accumulate) {                                               \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #r2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #kWidth \
                   "k32.f32.e4m3.e4m3 {" HEDDLE_N##kLast "}, %" #r0 ", %" #r1 ", p, 1, 1;\n}"                    \
                   : HEDDLE_D##kLast                                                                             \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                         \
    }                                                                                                            \
    static __device__ inline void registers_shared(float (&d)[kWidth / 2], const std::uint32_t (&a)[4],          \
                                                   std::uint64_t b, bool accumulate) {                           \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #r5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #kWidth \
                   "k32.f32.e4m3.e4m3 {" HEDDLE_N##kLast "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4    \
                                                         ", p, 1, 1;\n}"                                         \
                   : HEDDLE_D##kLast                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));     \
    }                                                                                                            \
  };

HEDDLE_WGMMA_E4M3(64, 3, 32, 33, 34, 35, 36, 37)
HEDDLE_WGMMA_E4M3(72, 3H, 36, 37, 38, 39, 40, 41)
HEDDLE_WGMMA_E4M3(104, 5H, 52, 53, 54, 55, 56, 57)
HEDDLE_WGMMA_E4M3(128, 7, 64, 65, 66, 67, 68, 69)
HEDDLE_WGMMA_E4M3(136, 7H, 68, 69, 70, 71, 72, 73)

HEDDLE_WGMMA_16BIT(48, 2, 24, 25, 26, 27, 28, 29, 30)
HEDDLE_WGMMA_16BIT(64, 3, 32, 33, 34, 35, 36, 37, 38)
HEDDLE_WGMMA_16BIT(96, 5, 48, 49, 50, 51, 52, 53, 54)
HEDDLE_WGMMA_16BIT(128, 7, 64, 65, 66, 67, 68, 69, 70)
HEDDLE_WGMMA_16BIT(192, 11, 96, 97, 98, 99, 100, 101, 102)
HEDDLE_WGMMA_16BIT(256, 15, 128, 129, 130, 131, 132, 133, 134)

}  // namespace heddle::cuda
