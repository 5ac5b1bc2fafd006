// One wrapper an instruction. PTX ISA 8.x; sm_90 unless said otherwise. Shared-memory addresses are 32-bit offsets in
// the shared window, as the instructions take them.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace heddle::cuda::ptx {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier: a phase ends when `arrivals` have arrived and all expected bytes have landed.

using Barrier = std::uint64_t;

__device__ inline void barrier_init(Barrier& barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

// Makes barrier_init visible to the asynchronous proxy and to the other CTAs of a cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ inline void barrier_arrive_expect(Barrier& barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

__device__ inline bool barrier_try_wait(Barrier& barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return done != 0;
}

// Whether the phase of this parity has ended, without waiting at all.
__device__ inline bool barrier_test(Barrier& barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return __all_sync(0xffffffff, done != 0);
}

// Waits until the phase of this parity has ended.
__device__ inline void barrier_wait(Barrier& barrier, std::uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// ---- Clusters

__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster that have not ended meet; what they wrote to shared memory is there for each other.
__device__ inline void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where CTA `rank` of the cluster has what this one has at `address` in shared memory.
__device__ inline std::uint32_t remote_address(std::uint32_t address, int rank) {
  std::uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ inline float4 load_remote_float4(std::uint32_t from) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ inline float2 load_remote_float2(std::uint32_t from) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// ---- Grids that follow each other (programmatic dependent launch)

// Returns when all that the grids before this one have written can be read.
__device__ inline void previous_grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next grid's CTAs start where there is room, up to their own previous_grid_wait().
__device__ inline void next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- Warps

// True in one lane of a whole warp. Cheaper than looking at the lane's number.
__device__ inline bool elect_one() {
  std::uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// ---- Barriers among some of a CTA's threads

// The `kThreads` threads that come to barrier number `kBarrier` wait for each other.
template <int kBarrier, int kThreads>
__device__ inline void barrier_sync() {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Of number `number`: waits until `threads`, this warp's among them, have come or arrived.
__device__ inline void barrier_sync(int number, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int number, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- Between CTAs, in global memory

__device__ inline int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ inline void add_release(int* to, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// ---- Words of 16 bytes

__device__ inline void store_relaxed_16(uint4* to, const uint4& words) {
  asm volatile(
      "{\n .reg .b64 low, high;\n .reg .b128 all;\n mov.b64 low, {%1, %2};\n mov.b64 high, {%3, %4};\n"
      " mov.b128 all, {low, high};\n st.relaxed.gpu.global.b128 [%0], all;\n}" ::"l"(to),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
}

__device__ inline uint4 load_relaxed_16(const uint4* from) {
  uint4 words;
  asm volatile(
      "{\n .reg .b64 low, high;\n .reg .b128 all;\n ld.relaxed.gpu.global.b128 all, [%4];\n"
      " mov.b128 {low, high}, all;\n mov.b64 {%0, %1}, low;\n mov.b64 {%2, %3}, high;\n}"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from)
      : "memory");
  return words;
}

__device__ inline uint4 load_shared_16(std::uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from)
               : "memory");
  return words;
}

__device__ inline void store_shared_16(std::uint32_t to, const uint4& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// ---- Registers of a warpgroup

template <int kRegisters>
__device__ inline void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Tensor memory accelerator

__device__ inline void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What the L2 cache should do with lines that a copy touches.
enum class L2 : std::uint64_t {
  evict_normal = 0x1000000000000000,
  evict_first = 0x12F0000000000000,
  evict_last = 0x14F0000000000000,
};

// `bytes` neighbouring bytes, which count at `barrier`; all in multiples of 16.
__device__ inline void bulk_load(void* to, const void* from, std::uint32_t bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// Adds `bytes` neighbouring bytes of floats in shared memory to those in global memory; in multiples of 16. This thread
// commits and waits for it.
__device__ inline void bulk_add(float* to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until what this thread has committed has left shared memory; or is done.
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Box at `c` (innermost first) of a 4-D tensor into shared memory; its bytes count at `barrier`. Elements outside the
// tensor arrive as zeros and count too.
__device__ inline void tma_load_4d(void* to, const CUtensorMap& map, Barrier& barrier, int c0, int c1, int c2, int c3,
                                   L2 hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}

__device__ inline void tma_load_5d(void* to, const CUtensorMap& map, Barrier& barrier, int c0, int c1, int c2, int c3,
                                   int c4, L2 hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
      "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}

// Orders this thread's earlier accesses to shared memory before later ones of the asynchronous proxy (TMA, wgmma).
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders this thread's earlier accesses, to global memory too, before later ones of the asynchronous proxy.
__device__ inline void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- Matrices of 8x8 16-bit elements between registers and shared memory; row addresses come from the lanes in turn

__device__ inline void store_matrix_x4(void* row, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                                       std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

__device__ inline void store_matrix_x4(std::uint32_t row, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                                       std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

// Each 8x8 matrix transposed.
__device__ inline void store_matrix_x4_transposed(std::uint32_t row, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ inline void load_matrix_x4(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Each 8x8 matrix transposed.
__device__ inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ inline void load_matrix_x4(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// ---- Asynchronous copies of 16 bytes (sm_80)

// Unless `exists`, zeros arrive and nothing is read.
__device__ inline void copy_async_16(std::uint32_t to, const void* from, bool exists) {
  asm volatile(
      "{\n .reg .pred p;\n setp.eq.u32 p, %2, 0;\n"
      " cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<std::uint32_t>(exists))
      : "memory");
}

// Four bytes; unless `exists`, a zero arrives and nothing is read.
__device__ inline void copy_async_4(std::uint32_t to, const void* from, bool exists) {
  asm volatile(
      "{\n .reg .pred p;\n setp.eq.u32 p, %2, 0;\n"
      " cp.async.ca.shared.global [%0], [%1], 4, p;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<std::uint32_t>(exists))
      : "memory");
}

// The first `bytes` of kBytes (4 or 16) are copied, the rest become zeros and are not read.
template <int kBytes>
__device__ inline void copy_async(std::uint32_t to, const void* from, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
}

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest `kPending` committed groups of this thread have landed.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Matrix products of a warp (sm_80): D[16, 8] += A[16, 16] B[16, 8]
//
// With row = lane / 4 and column = 2 (lane % 4), two elements a register: d0, d1 (row, column), (row, column + 1); d2,
// d3 (row + 8, ...); a0 (row, k), a1 (row + 8, k), a2 (row, k + 8), a3 (row + 8, k + 8) with k = column; b0 (k, n), b1
// (k + 8, n) with n = lane / 4.

template <class T>
__device__ void mma_16816(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

template <>
__device__ inline void mma_16816<__nv_bfloat16>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_16816<__half>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Words that other CTAs read and write meanwhile (sm_70)

__device__ inline void store_relaxed(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ inline std::uint64_t load_relaxed(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// D[16, 8] += A[16, 8] B[8, 8] in tf32, which takes registers of float32 and ignores their lowest 13 bits: a0 (row, k),
// a1 (row + 8, k), a2 (row, k + 4), a3 (row + 8, k + 4), b0 (k, n), b1 (k + 4, n) with k = lane % 4; d as above.
__device__ inline void mma_1688(float (&d)[4], const std::uint32_t* a, const std::uint32_t* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Arithmetic

// 2^x, largest relative error 2^-22.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats, rounded to nearest even, `low` in the low half.
template <class T>
__device__ std::uint32_t pack2(float low, float high);

template <>
__device__ inline std::uint32_t pack2<__nv_bfloat16>(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ inline std::uint32_t pack2<__half>(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four floats as e4m3, rounded to nearest even, saturating; the first in the lowest byte.
__device__ inline std::uint32_t pack4_e4m3(float x0, float x1, float x2, float x3) {
  std::uint32_t packed;
  asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

// Two 16-bit floats, the low half first.
template <class T>
__device__ float2 unpack2(std::uint32_t words);

template <>
__device__ inline float2 unpack2<__nv_bfloat16>(std::uint32_t words) {
  return {__uint_as_float(words << 16), __uint_as_float(words & 0xFFFF0000)};
}

template <>
__device__ inline float2 unpack2<__half>(std::uint32_t words) {
  return __half22float2(*reinterpret_cast<const __half2*>(&words));
}

// ---- E4M3

// The two values in the low half of `pair`, exactly.
__device__ inline std::uint32_t e4m3x2_to_f16x2(std::uint32_t pair) {
  std::uint32_t words;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(words)
      : "r"(pair));
  return words;
}

// Rounded to nearest even; what is beyond 448 becomes 448.
__device__ inline std::uint8_t float_to_e4m3(float x) {
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return static_cast<std::uint8_t>(pair);
}

}  // namespace heddle::cuda::ptx
