// Pieces run: attention and its gradients between a rank's rows and a buffer of keys.
#pragma once

#include <deque>
#include <map>
#include <utility>

#include "distributed/memory.h"
#include "heddle/distributed.h"

namespace heddle::distributed {

// The tensors of one rank's call: rows [B, rows, ...], keys [B, keys, ...], lse [B, H, rows].
struct Rows {
  TensorView q, o, lse;
};
struct RowGradients {
  TensorView d_o, d_lse, dq;
  TensorView dbias = {};  // f32, rows and keys side by side: added to
};

// What calls of a rank need besides its tensors: a workspace, and the pieces' index data where attention reads it. Each
// piece's is written there by the first call with it, and kept: a graph that holds the call reads it again.
class CallMemory {
 public:
  struct Indices {
    TensorView cu_seqlens_q, cu_seqlens_k, q_offset, key_offset;  // cu_seqlens: not given of one sequence
  };

  explicit CallMemory(Memory& memory) : memory_(memory), workspace_(memory) {}
  Workspace workspace(std::size_t bytes) { return {workspace_.get(bytes), bytes}; }
  // For what one piece adds to the gradient of a bias.
  Buffer& bias_gradient() { return bias_gradient_; }
  Memory& memory() const { return memory_; }
  // piece stays where it is while this is there. batch: of sequences with the piece's one offset.
  const Indices& indices_of(const Piece& piece, std::int64_t batch);

 private:
  TensorView written(const std::vector<std::int32_t>& x);

  Memory& memory_;
  Buffer workspace_, bias_gradient_{memory_};
  std::deque<Buffer> index_memory_;
  std::map<std::pair<const Piece*, std::int64_t>, Indices> indices_;
};

class Calls {
 public:
  // runtime: its executor, stream and validate. options outlive this.
  Calls(const Options& options, const Runtime& runtime, CallMemory& memory)
      : options_(options), runtime_(runtime), memory_(memory) {}

  // Writes o and, if given, lse of the piece's rows. sink: whether this is all that the rows attend.
  void forward(const Piece& piece, const Rows& rows, const TensorView& k, const TensorView& v, bool sink);
  // Adds to dq, dk, dv and dbias, f32. merged: o and lse are those of several pieces.
  void backward(const Piece& piece, const Rows& rows, const RowGradients& gradients, const TensorView& k,
                const TensorView& v, const TensorView& dk, const TensorView& dv, bool merged);
  // Of all these rows; needs no keys of theirs but a view of none.
  void sink_gradient(const Rows& rows, const RowGradients& gradients, const TensorView& k, const TensorView& v,
                     const TensorView& dsink);

 private:
  AttentionOptions base(const Rows& rows, bool sink) const;
  void add_bias_gradient(const Piece& piece, const TensorView& found, const TensorView& dbias) const;
  // Calls use(options, b) with the piece's options: once, b -1, for all sequences of the batch, or for each.
  template <class Use>
  void for_each_call(const Piece& piece, AttentionOptions options, std::int64_t batch, const Use& use);
  Runtime runtime(std::size_t bytes) const {
    Runtime out = runtime_;
    out.workspace = memory_.workspace(bytes);
    return out;
  }

  const Options& options_;
  const Runtime& runtime_;
  CallMemory& memory_;
};

}  // namespace heddle::distributed
