// Tiles, stages and shared memory of the Hopper forward.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"

namespace heddle::cuda::sm90::attention_fwd {

constexpr int kRows = 64;   // of a warpgroup: the M of wgmma
constexpr int kPanel = 64;  // 16-bit elements in a row of the 128-byte swizzle

template <class T, int kHeadSize_, int kValueSize_, int kTileK_, int kConsumers_, int kStages_, bool kQInRegisters_,
          bool kScoreOptions_ = false>
struct Config {
  using Element = T;
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kValueSize = kValueSize_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups of kRows query rows
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;               // of K and of V
  static constexpr bool kQInRegisters = kQInRegisters_;  // else wgmma reads q from shared memory for every key tile
  static constexpr bool kScoreOptions = kScoreOptions_;  // softcap, ALiBi, bias, mask, scales that are not positive
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr bool kWideProducers = kScoreOptions;  // the guard looks masks up
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kWideProducers ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kWideProducers ? 224 : 232;
};

// A [rows, columns] tile in panels of 64 columns.
template <class T, int kRows, int kColumns>
struct alignas(1024) Tile {
  static constexpr int kPanels = (kColumns + kPanel - 1) / kPanel;
  static constexpr std::uint32_t kPanelBytes = kRows * kPanel * sizeof(T);
  T panel[kPanels][kRows][kPanel];
};

// One tile of work: rows of one head (or group of heads) of one sequence, and the key tiles that they meet.
struct alignas(16) Work {
  int position;               // of the first row in its sequence; < 0: no more work
  int h, sequence;            // head unit (a head, or a kv head's whole group if packed)
  int q_row, k_row;           // the sequence's first row in packed q and k; 0 if they are not
  int rows, used_rows, keys;  // stored rows, rows and keys in use
  int off;
  int begin, end;              // keys that some row attends are in [begin, end)
  int k_begin, k_end;          // key tiles, k_end > k_begin
  int whole_begin, whole_end;  // those that every row attends wholly
};

constexpr int kWorkSlots = 4;  // announced tiles that are not yet written out

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  Tile<T, kRows, C::kHeadSize> q[C::kConsumers];
  Tile<T, C::kTileK, C::kHeadSize> k[C::kStages];
  Tile<T, C::kTileK, C::kValueSize> v[C::kStages];
  T o[4 * C::kConsumers][16][kPanel];  // a warp's rows of O on their way out, one panel at a time
  Work work[kWorkSlots];
  ptx::Barrier work_ready[kWorkSlots], work_free[kWorkSlots];
  ptx::Barrier q_ready[C::kConsumers], q_free[C::kConsumers];
  ptx::Barrier k_ready[C::kStages], k_free[C::kStages];
  ptx::Barrier v_ready[C::kStages], v_free[C::kStages], v_landed[C::kStages];
};

// The same value, of which the compiler knows nothing: what is computed from it inside a loop stays inside. Registers
// are scarcer here than the few instructions that hoisting would save once a tile.
__device__ inline int recomputed(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Position in a ring of buffers, and the parity of its barriers' phases.
template <int kSize>
struct RingPosition {
  int index = 0;
  std::uint32_t phase = 0;
  __device__ void next() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1;
    }
  }
};

}  // namespace heddle::cuda::sm90::attention_fwd
