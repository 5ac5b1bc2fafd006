// A layer's call. Arguments are checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "heddle/sparse.h"
#include "model/asam_weights.h"
#include "model/cpu_workspace.h"

namespace heddle {

class AsamLayer::Call {
 public:
  Call(const Weights& weights, std::int64_t batch, std::int64_t length, Executor& executor);

  std::size_t workspace() const { return bytes_; }
  void run(const TensorView& x, const TensorView& y, const AsamOptions& options, const AsamInfo& info,
           std::byte* workspace);

 private:
  // Which keys a list has.
  enum class Keys : std::uint8_t { attended, rest };

  std::int64_t heads() const { return config_.num_heads; }
  std::int64_t blocks() const { return (length_ + config_.block_size - 1) / config_.block_size; }
  std::int64_t prefixes() const { return config_.causal ? blocks() : 1; }
  bool soft() const { return weights_.gate.has_value() && config_.gate == AsamGate::soft; }
  std::int64_t most_entries() const;
  // Which of the scores' B * R prefixes is that of block n of rows.
  std::int64_t score_at(std::int64_t b, std::int64_t n) const { return b * prefixes() + (config_.causal ? n : 0); }
  AsamPattern pattern_of(const AsamBlock& block) const;

  void project(const TensorView& x);
  void choose();
  void list(Keys keys, const AsamSelection& selection);
  void attend(float* o, float* lse, const TensorView& lengths);
  void join();
  void finish(const TensorView& y);
  void tell(const AsamInfo& info, const AsamSelection& selection) const;

  AttentionOptions attention_options(const TensorView& lengths) const;
  BlockLists lists(const TensorView& blocks, const TensorView& counts) const;
  TensorView of_qkv(int part) const;
  std::size_t attention_bytes() const;
  template <class T>
  T* at(std::size_t place) const {
    return reinterpret_cast<T*>(workspace_ + place);
  }
  template <class T>
  T* scratch(int worker, std::size_t place) const {
    return at<T>(workers_ + worker_bytes_ * static_cast<std::size_t>(worker) + place);
  }

  const Weights& weights_;
  const AsamConfig& config_;
  const std::int64_t batch_, length_, total_;
  Executor& executor_;
  std::optional<AsamGateCall> gate_;
  AsamScores scores_;
  std::byte* workspace_ = nullptr;

  // Rows are as many as whole steps of linear layers hold.
  std::size_t x_ = 0;     // f32 [rows, dim]: the residual stream
  std::size_t rows_ = 0;  // f32 [rows, dim] for the gate: norm(x); then [rows, H * D]: attention's output
  std::size_t qkv_ = 0;   // f32 [rows, 3 H D]
  std::size_t blocks_ = 0, counts_ = 0;              // int32 [B, N, H, entries], [B, N, H]
  std::size_t choices_ = 0;                          // int32 [B * R, H]: the pattern of each head
  std::size_t row_clusters_ = 0, key_clusters_ = 0;  // int32 [B, N, H]
  std::size_t rest_ = 0;                             // f32 [B, T, H * D]: with a soft gate, over the rest of the keys
  std::size_t lse_ = 0, rest_lse_ = 0;               // f32 [B, H, T]
  std::size_t attention_ = 0, attention_bytes_ = 0;
  std::size_t workers_ = 0, worker_bytes_ = 0, bytes_ = 0;
  // Of each worker:
  std::size_t kept_ = 0, ranks_ = 0;              // uint8 [N], uint64 [N]
  std::size_t normed_ = 0, wide_ = 0, sums_ = 0;  // f32 [kLinearRows, dim], [kLinearRows, 4 dim], [kLinearRows, dim]
  std::size_t linear_ = 0;
};

}  // namespace heddle
