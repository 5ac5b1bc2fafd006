#include "cpu/int4_cache.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/rotation.h"
#include "lowbit/int4_codes.h"

namespace heddle::cpu {
namespace {

void put_half(std::byte* to, float x) {
  const std::uint16_t bits = f32_to_f16(x);
  std::memcpy(to, &bits, 2);
}

void put_code(std::byte& to, int bit, std::uint8_t code) {
  to = (to & ~(std::byte{15} << bit)) | std::byte{code} << bit;
}

// keys: channel d of each of the block's.
void encode_channel(const float* keys, std::int64_t d, const Int4Block& format, std::byte* block) {
  Int4Range range;
  for (std::int64_t j = 0; j < kInt4Keys; ++j) range.add(keys[j]);
  const Int4Scale group(range);
  put_half(block + format.k_scales() + 2 * d, group.scale);
  put_half(block + format.k_zeros() + 2 * d, group.zero);
  for (std::int64_t j = 0; j < kInt4Keys; ++j) {
    put_code(block[format.k_code(j, d)], Int4Block::k_bit(j, d), group.code(keys[j]));
  }
}

// row: of value j.
void encode_value(const float* row, std::int64_t j, const Int4Block& format, std::byte* block) {
  for (std::int64_t from = 0; from < format.Dv; from += kInt4Channels) {
    Int4Range range;
    for (std::int64_t d = from; d < from + kInt4Channels; ++d) range.add(row[d]);
    const Int4Scale group(range);
    put_half(block + format.v_scales() + format.v_scale(j, from), group.scale);
    put_half(block + format.v_zeros() + format.v_scale(j, from), group.zero);
    for (std::int64_t d = from; d < from + kInt4Channels; ++d) {
      put_code(block[format.v_code(j, d)], Int4Block::v_bit(j, d), group.code(row[d]));
    }
  }
}

// One kv head of one sequence.
class HeadAppend {
 public:
  HeadAppend(const Int4AppendProblem& problem, std::int64_t sequence, std::int64_t kv_head)
      : p_(problem), b_(sequence), h_(kv_head), before_(p_.seqlens[b_]), after_(before_ + p_.S) {}

  void run() const {
    const std::int64_t first = int4_blocks(before_), end = int4_blocks(after_);
    for (std::int64_t n = first; n < end; ++n) encode(n, p_.block(b_, p_.page(b_, n), h_));
    // Behind the blocks: new rows may take slots that those had.
    for (std::int64_t j = std::max(before_, end * kInt4Keys); j < after_; ++j) {
      const std::int64_t slot = j % kInt4Tail;
      store(j, false, p_.k_tail.at(p_.row(b_), slot, h_), p_.k_tail.stride_d);
      store(j, true, p_.v_tail.at(p_.row(b_), slot, h_), p_.v_tail.stride_d);
    }
  }

 private:
  // New row j, rotated and rounded as the ring has it.
  void store(std::int64_t j, bool of_values, std::byte* to, std::int64_t stride) const {
    const Operand& from = of_values ? p_.v_new : p_.k_new;
    const std::byte* row = from.at(b_, j - before_, h_);
    if (of_values || p_.rotary.dims == 0) {
      copy_row(row, from.stride_d, to, stride, from.dtype, of_values ? p_.Dv : p_.D);
    } else {
      Rotation(p_.rotary, j).apply(row, from.stride_d, to, stride, from.dtype, p_.D);
    }
  }

  // Row j, new or from the ring.
  void gather(std::int64_t j, bool of_values, std::byte* to) const {
    if (j >= before_) return store(j, of_values, to, 1);
    const Operand& tail = of_values ? p_.v_tail : p_.k_tail;
    copy_row(tail.at(p_.row(b_), j % kInt4Tail, h_), tail.stride_d, to, 1, tail.dtype, of_values ? p_.Dv : p_.D);
  }

  // Keys channel by channel, so all of them are gathered first; values one by one.
  void encode(std::int64_t n, std::byte* block) const {
    const Int4Block format{p_.D, p_.Dv};
    const DType dtype = p_.k_tail.dtype;
    alignas(64) std::byte rows[kInt4Keys * 2 * kMaxRotaryDims];  // no head is larger
    alignas(64) float wide[kMaxRotaryDims];
    for (std::int64_t j = 0; j < kInt4Keys; ++j) gather(n * kInt4Keys + j, false, rows + j * 2 * p_.D);
    for (std::int64_t d = 0; d < p_.D; ++d) {
      kernels().load_row(rows + 2 * d, dtype, p_.D, kInt4Keys, kInt4Keys, wide);
      encode_channel(wide, d, format, block);
    }
    for (std::int64_t j = 0; j < kInt4Keys; ++j) {
      gather(n * kInt4Keys + j, true, rows);
      kernels().load_row(rows, dtype, 1, p_.Dv, p_.Dv, wide);
      encode_value(wide, j, format, block);
    }
  }

  const Int4AppendProblem& p_;
  const std::int64_t b_, h_, before_, after_;
};

void launch(const Int4AppendProblem& p, const Runtime& runtime) {
  parallel_for(*runtime.executor, p.B * p.Hkv,
               [&p](std::int64_t task, int) { HeadAppend(p, task / p.Hkv, task % p.Hkv).run(); });
}

double estimate(const Int4AppendProblem& p, int workers) {
  constexpr double kEncoded = 0.8e9;  // bytes a second of one thread, as an Intel Xeon of 2023 has them with AVX2
  return p.bytes() / (kEncoded * workers);
}

std::string describe(const Int4AppendProblem& p, int workers) {
  return text(kernels().name, ", ", p.B * p.Hkv, " tasks, one for each kv head of a sequence, ", workers,
              workers == 1 ? " thread" : " threads");
}

}  // namespace

const Int4AppendKernel kInt4CacheAppend = {
    .name = "cpu",
    .method = "append",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = estimate,
    .workspace = no_workspace,
    .launch = launch,
    .describe = describe,
};

}  // namespace heddle::cpu
