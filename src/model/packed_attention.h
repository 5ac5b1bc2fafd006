// The attention of packed rows of queries, keys and values: [total, (heads + 2 kv_heads) * head], as one product leaves
// them, all query heads before the key heads, and those before the value heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "heddle/attention.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

struct PackedAttention {
  DType dtype = DType::f32;
  Device device = Device::cpu;
  std::int64_t heads = 0, kv_heads = 0, head = 0;
  Causal causal = Causal::none;
  std::string method;

  std::int64_t columns() const { return (heads + 2 * kv_heads) * head; }

  // Of `total` rows; cu_seqlens and `longest` as AttentionOptions has them. Only offsets on the CPU are read.
  std::size_t workspace(std::int64_t total, const TensorView& cu_seqlens, std::int64_t longest,
                        const Runtime& runtime) const;
  // On a GPU, of any `sequences` sequences of at most `longest` rows.
  std::size_t gpu_workspace(std::int64_t total, std::int64_t sequences, std::int64_t longest) const;
  // context: [total, heads * head].
  void run(std::int64_t total, const TensorView& cu_seqlens, std::int64_t longest, const std::byte* qkv,
           std::byte* context, const Runtime& runtime) const;

 private:
  struct Operands {
    TensorView q, k, v;
  };
  Operands operands(std::int64_t total, const std::byte* qkv) const;  // qkv: null before there is any
  // `count` heads of each row of `data` (null: it is to come), from head `first` on.
  TensorView rows(std::int64_t total, const std::byte* data, std::int64_t first, std::int64_t count,
                  std::int64_t stride) const;
  AttentionOptions options(const TensorView& cu_seqlens, std::int64_t longest) const;
};

}  // namespace heddle
