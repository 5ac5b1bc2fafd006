// Pieces run: attention and its gradients between a rank's rows and a buffer of keys.
#pragma once

#include <vector>

#include "heddle/distributed.h"

namespace heddle::distributed {

// The tensors of one rank's call: rows [B, rows, ...], keys [B, keys, ...], lse [B, H, rows].
struct Rows {
  TensorView q, o, lse;
};
struct RowGradients {
  TensorView d_o, d_lse, dq;
};

class Calls {
 public:
  // runtime: its executor and validate. options outlive this.
  Calls(const Options& options, const Runtime& runtime, WorkspaceBuffer& workspace)
      : options_(options), runtime_(runtime), workspace_(workspace) {}

  // Writes o and, if given, lse of the piece's rows. sink: whether this is all that the rows attend.
  void forward(const Piece& piece, const Rows& rows, const TensorView& k, const TensorView& v, bool sink);
  // Adds to dq, dk and dv, f32. merged: o and lse are those of several pieces.
  void backward(const Piece& piece, const Rows& rows, const RowGradients& gradients, const TensorView& k,
                const TensorView& v, const TensorView& dk, const TensorView& dv, bool merged);
  // Of all these rows; needs no keys of theirs but a view of none.
  void sink_gradient(const Rows& rows, const RowGradients& gradients, const TensorView& k, const TensorView& v,
                     const TensorView& dsink);

 private:
  AttentionOptions base(const Rows& rows, bool sink) const;
  // Calls use(options, b) with the piece's options: once, b -1, for all sequences of the batch, or for each.
  template <class Use>
  void for_each_call(const Piece& piece, AttentionOptions options, std::int64_t batch, const Use& use);
  Runtime runtime(std::size_t bytes) const {
    Runtime out = runtime_;
    out.workspace = workspace_.get(bytes);
    return out;
  }

  const Options& options_;
  const Runtime& runtime_;
  WorkspaceBuffer& workspace_;
};

}  // namespace heddle::distributed
