// A step of decoding of native sparse attention after its arguments were checked (include/heddle/nsa.h).
#pragma once

#include <cstdint>

#include "heddle/nsa.h"
#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle {

struct NsaStepProblem {
  std::int64_t B = 0, H = 0, G = 0;  // G query heads to each of H key/value heads
  std::int64_t D = 0, Dv = 0;
  std::int64_t capacity = 0, pooled = 0;  // rows of the cache, and of pooled keys: capacity / block
  std::int64_t block = 64;                // keys of a block of the lists, and of a pooled key
  std::int64_t slots = 0, window = 0;     // blocks of a list; keys of the window, 0: there is none
  ForcedBlocks forced;
  float scale = 1;
  bool batch_invariant = false;
  DType dtype = DType::bf16;
  Device device = Device::cpu;
  Operand q, out;                         // [B, 1, H G, D | Dv]
  Operand k_new, v_new;                   // [B, 1, H, D | Dv]
  Operand k, v, k_pooled, v_pooled;       // [B, capacity | pooled, H, D | Dv]
  Plane g_cmp, g_slc, g_swa;              // [b, h, i], of any floating-point dtype; not given: no such branch
  const std::int32_t* lengths = nullptr;  // [B]: keys before the step
  // Of a cache in pages, [B, ...]; k, v [pages, page_size, H, D | Dv] and the pooled [pages, page_size / block, ...].
  const std::int32_t* page_table = nullptr;
  std::int64_t page_table_stride = 0, page_size = 0, pages = 0;

  // What a sequence has when its row comes. Nobody has checked lengths on a GPU: they are clamped, so that no row
  // outside the tensors is named, and a row for which there is no room is dropped.
  struct Step {
    std::int64_t keys = 0;      // that the row sees
    bool appends = false;       // the last of them is the step's own
    std::int64_t complete = 0;  // blocks
    bool completes = false;     // the step's key ends the last of these
  };
  // block_log2: of `block`, so that nothing is divided.
  constexpr Step step(std::int64_t b, int block_log2) const {
    const std::int64_t before = lengths[b];
    Step s;
    s.keys = clamped(before + 1, 0, capacity);
    s.appends = before >= 0 && before < capacity;
    const std::int64_t ended = s.keys >> block_log2;
    s.complete = ended < pooled ? ended : pooled;
    s.completes = s.appends && ended << block_log2 == s.keys;
    return s;
  }

  // Bytes that a call over a full cache reads.
  double bytes() const {
    const std::int64_t chosen = slots * block < capacity ? slots * block : capacity;
    const std::int64_t near = window < capacity ? window : capacity;
    return static_cast<double>(B * H * (pooled + chosen + near) * (D + Dv)) * static_cast<double>(size_of(dtype));
  }
};

using NsaStepKernel = Kernel<NsaStepProblem>;

}  // namespace heddle
