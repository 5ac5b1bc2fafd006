// The choice of blocks by pooled keys' scores after its arguments were checked (include/heddle/nsa.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "heddle/nsa.h"
#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle {

// A call over sequences of S rows from position 0 on, with as many pooled keys as they have whole blocks; q, pooled
// keys and lse drawn at random.
struct SelectExample {
  DType dtype;
  std::int64_t B, H, Hkv, S, D;
  std::int64_t block_size, slots;

  constexpr std::int64_t pooled() const { return S / block_size; }
};

// k, and v too, are the pooled keys, and Sequence::sk their number; lse, if it is given, is read.
struct SelectProblem : AttentionProblem {
  using Example = SelectExample;

  std::int32_t* blocks = nullptr;
  std::int64_t blocks_stride_b = 0, blocks_stride_n = 0, blocks_stride_l = 0;  // of lists, elements
  std::int64_t slots = 0;                                                      // n
  std::int64_t block_size = 64, compression_block = 64, compression_stride = 64;
  ForcedBlocks forced;
  std::int64_t q_step = 1;

  // Strides that a block of the lists, and a pooled key, have: l' / d and l / d.
  constexpr std::int64_t wide() const { return block_size / compression_stride; }
  constexpr std::int64_t narrow() const { return compression_block / compression_stride; }

  constexpr std::int64_t position(const Sequence& s, std::int64_t i) const { return s.q_offset + q_step * i; }
  // How many pooled keys a row at position t sees: the first ones.
  constexpr std::int64_t seen(const Sequence& s, std::int64_t t) const {
    if (t + 1 < compression_block) return 0;
    return std::min(s.sk, (t + 1 - compression_block) / compression_stride + 1);
  }
  // How many blocks, the first ones, the first so many pooled keys touch.
  constexpr std::int64_t touched(std::int64_t seen) const { return seen == 0 ? 0 : (seen + narrow() - 2) / wide() + 1; }
  // How often pooled key c counts for block j, of c - wide j: the m < wide and n < narrow with m - n equal to it.
  constexpr std::int64_t weight(std::int64_t offset) const {
    const std::int64_t first = std::max<std::int64_t>(0, -offset), last = std::min(narrow(), wide() - offset);
    return std::max<std::int64_t>(0, last - first);
  }

  // The forced blocks of a row at position t, each once, ascending.
  struct Forced {
    std::int64_t blocks[3] = {}, count = 0;

    constexpr void add(std::int64_t block) {
      if (block >= 0 && (count == 0 || blocks[count - 1] != block)) blocks[count++] = block;
    }
    constexpr bool holds(std::int64_t block) const {
      for (std::int64_t n = 0; n < count; ++n) {
        if (blocks[n] == block) return true;
      }
      return false;
    }
  };
  constexpr Forced forced_at(std::int64_t t) const {
    const std::int64_t current = t / block_size;
    Forced out;
    if (forced.first) out.add(0);
    if (forced.previous) out.add(current - 1);
    if (forced.current) out.add(current);
    return out;
  }

  constexpr std::int32_t* list(std::int64_t b, const Sequence& s, std::int64_t i, std::int64_t kv_head) const {
    return blocks + b * blocks_stride_b + (s.q_begin + i) * blocks_stride_n + kv_head * blocks_stride_l;
  }
};

using SelectKernel = Kernel<SelectProblem>;

}  // namespace heddle
