// Tiles, stages and shared memory of the Hopper forward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"

namespace heddle::cuda::sm90::attention_fwd {

constexpr int kRows = 64;   // of a warpgroup: the M of wgmma
constexpr int kPanel = 64;  // 16-bit elements in a row of the 128-byte swizzle

// What a kernel can do to scores. Each makes the loop over keys longer, and its code is too long for the instruction
// caches as it is: a jump over an option that is not used costs about 80 cycles.
enum ScoreOption : unsigned {
  kSoftcap = 1,
  kAlibi = 2,
  kKeyPlanes = 4,   // bias or mask by PlaneAccess::keys
  kTilePlanes = 8,  // by PlaneAccess::copies
  kAnyPlanes = 16,  // by PlaneAccess::direct; also scales that are not positive
  kAllOptions = 31,
};

template <class T, int kHeadSize_, int kValueSize_, int kTileK_, int kConsumers_, int kStages_, bool kQInRegisters_,
          unsigned kOptions_ = 0>
struct Config {
  using Element = T;
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kValueSize = kValueSize_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups of kRows query rows
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;               // of K and of V
  static constexpr bool kQInRegisters = kQInRegisters_;  // else wgmma reads q from shared memory for every key tile
  static constexpr unsigned kOptions = kOptions_;        // of ScoreOption
  static constexpr bool kRemovesPairs = (kOptions & (kKeyPlanes | kTilePlanes | kAnyPlanes)) != 0;
  static constexpr bool kRepeatsTiles = kRemovesPairs;  // that came out spoiled
  static constexpr bool kGuessesMaxima = false;         // of rows, and repeats tiles where that went wrong
  // Bias and mask tiles that shared memory has a place for (2: one of each), and stages of each.
  static constexpr int kPlanes = kHeadSize <= 128 ? 2 : 1;
  static constexpr int kPlaneStages = kHeadSize <= 64 ? 2 : 1;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kRemovesPairs ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kRemovesPairs ? 224 : 232;
};

// A [rows, columns] tile in panels of 64 columns.
template <class T, int kRows, int kColumns>
struct alignas(1024) Tile {
  static constexpr int kPanels = (kColumns + kPanel - 1) / kPanel;
  static constexpr std::uint32_t kPanelBytes = kRows * kPanel * sizeof(T);
  T panel[kPanels][kRows][kPanel];
};

// Bias and mask of a consumer warp's 16 rows and a key tile. 16-byte chunk c of a row lies at chunk c ^ (row % 8), in
// rows of 64 bytes at c ^ (row / 2 % 4).
template <class C>
struct alignas(128) PlaneTiles {
  static constexpr int kRowsOfWarp = 16;
  std::byte bytes[C::kPlaneStages * kRowsOfWarp * C::kTileK * (C::kPlanes + 1)];

  // 16-bit elements, and mask bytes: behind the bias if both have a place.
  __device__ std::byte* bias(int stage) { return bytes + stage * (kRowsOfWarp * C::kTileK * 2); }
  __device__ std::byte* mask(int stage) {
    constexpr int kBegin = C::kPlanes == 2 ? C::kPlaneStages * kRowsOfWarp * C::kTileK * 2 : 0;
    return bytes + kBegin + stage * (kRowsOfWarp * C::kTileK);
  }
};

// Announcements that are no tile. Pause: finish what is there and come back; shared memory is then quiet.
constexpr int kNoMoreTiles = -1, kPause = -2;

// One tile of work: rows of one head (or group of heads) of one sequence, and the key tiles that they meet.
struct alignas(16) Work {
  int position;               // of the first row in its sequence; or one of the above
  int h, sequence;            // head unit (a head, or a kv head's whole group if packed)
  int q_row, k_row;           // the sequence's first row in packed q and k; 0 if they are not
  int rows, used_rows, keys;  // stored rows, rows and keys in use
  int off;
  int begin, end;              // keys that some row attends are in [begin, end)
  int k_begin, k_end;          // key tiles, k_end > k_begin
  int whole_begin, whole_end;  // those that every row attends wholly
  int careful;                 // every tile of v passes the guard, no maximum is guessed
  int spoiled;                 // something is not finite: the consumers ask for the tile again, careful
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
  struct Nothing {};
  std::conditional_t<C::kOptions != 0, PlaneTiles<C>, Nothing> planes[4 * C::kConsumers];
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
