#include <algorithm>

#include "cuda/any/attention_int8_qk/launch.h"
#include "cuda/any/attention_int8_qk/variants.h"
#include "cuda/common/attention/log2.h"

namespace heddle::cuda::any::attention_int8_qk {
namespace {

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

// Places one array after the other, each at a multiple of 64 bytes.
class Places {
 public:
  explicit Places(void* memory) : memory_(static_cast<std::byte*>(memory)) {}
  std::size_t used() const { return used_; }
  std::byte* next(std::int64_t bytes) {
    std::byte* place = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += static_cast<std::size_t>(ceil_div(bytes, 64) * 64);
    return place;
  }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

Codes place(const AttentionProblem& p, Places& places) {
  Codes c{};
  c.pitch = std::max(p.D, p.Dv) <= 64 ? 64 : 128;
  c.blocks = ceil_div(p.Sk, kBlockKeys);
  c.scale_log2 = p.scale * kLog2e;
  const auto rows = [&](bool packed, std::int64_t heads, std::int64_t each) {
    const std::int64_t head = each * c.pitch;
    Operand x{.stride_b = packed ? 0 : heads * head, .stride_s = c.pitch, .stride_h = head, .stride_d = 1};
    x.data = places.next((packed ? 1 : p.B) * heads * head);
    return x;
  };
  const bool packed_q = p.cu_seqlens_q.given;
  const auto per_row = [&] {
    Scales x{.stride_b = packed_q ? 0 : p.H * p.q_rows, .stride_s = 1, .stride_h = p.q_rows};
    x.data = reinterpret_cast<float*>(
        places.next((packed_q ? 1 : p.B) * p.H * p.q_rows * static_cast<std::int64_t>(sizeof(float))));
    return x;
  };
  const auto per_key_head = [&](std::int64_t bytes) { return places.next(p.B * p.Hkv * bytes); };
  c.q = rows(packed_q, p.H, p.q_rows);
  c.k = rows(p.cu_seqlens_k.given, p.Hkv, p.k_rows);
  c.q_scale = per_row();
  c.q_shift = per_row();
  c.groups =
      reinterpret_cast<KeyGroup*>(per_key_head(c.blocks * kGroups * static_cast<std::int64_t>(sizeof(KeyGroup))));
  c.means = reinterpret_cast<float*>(per_key_head(c.pitch * static_cast<std::int64_t>(sizeof(float))));
  return c;
}

}  // namespace

std::size_t workspace_bytes(const AttentionProblem& p) {
  Places places(nullptr);
  place(p, places);
  return places.used();
}

Codes codes_in(const AttentionProblem& p, void* workspace) {
  Places places(workspace);
  return place(p, places);
}

std::int64_t blocks_to_launch(const AttentionProblem& p) {
  return p.B * (p.Hkv * ceil_div(p.Sk, kBlockKeys) + p.H * ceil_div(p.Sq, kBlockRows));
}

void launch(const AttentionProblem& p, const Codes& codes, cudaStream_t stream) {
  const auto divisor = [](std::int64_t x) { return Divisor(static_cast<unsigned>(std::max<std::int64_t>(x, 1))); };
  const std::int64_t row_blocks = ceil_div(p.Sq, kBlockRows);
  const Params params{.problem = p,
                      .codes = codes,
                      .heads = divisor(p.H),
                      .kv_heads = divisor(p.Hkv),
                      .group = divisor(p.G),
                      .blocks = divisor(codes.blocks),
                      .row_blocks = divisor(row_blocks),
                      .key_launches = static_cast<unsigned>(p.B * p.Hkv * codes.blocks),
                      .row_launches = static_cast<unsigned>(p.B * p.H * row_blocks)};
  const auto has_pitch = [&](const Variant& v) { return v.pitch == codes.pitch; };
  first_that(variants(p.dtype), has_pitch).launch(params, stream);
}

std::span<const Variant> variants(DType type) { return variants_of<Instance, kTypes, kVariants>(type); }

}  // namespace heddle::cuda::any::attention_int8_qk
