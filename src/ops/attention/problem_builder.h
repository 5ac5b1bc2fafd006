// The steps of checking an attention call, each for some of its arguments: they fill an AttentionProblem.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "core/check.h"
#include "ops/attention/arguments.h"
#include "problem/attention.h"

namespace heddle {

// Of the view's data and dtype; strides are to be filled in.
Plane plane_of(const TensorView& view);

class ProblemBuilder {
 public:
  ProblemBuilder(const Check& check, const TensorView& q, const TensorView& k, const TensorView& v,
                 const AttentionOptions& options, const KeyStorage& storage = {})
      : check_(check), options_(options), q_(q), k_(k), v_(v), names_(storage.names), capacity_(storage.capacity) {}

  void build(AttentionProblem& p) const {
    operands(p);
    lengths(p);
    cache(p);
    used(p);
    offsets(p);
    scores(p);
    per_head(p);
    planes(p);
    positions(p);
    draft(p);
    all_scales(p);
    p.precision = options_.precision;
    p.float32_out = options_.float32_out;
    p.batch_invariant = options_.batch_invariant;
    p.deterministic = options_.deterministic;
  }

  bool packed_q() const { return options_.cu_seqlens_q.given(); }
  bool packed_k() const { return options_.cu_seqlens_k.given(); }

  // o or d_o: q's rows and heads, Dv columns.
  Operand output(const AttentionProblem& p, const TensorView& view, const char* name) const;
  // dq, dk or dv: `model`'s shape.
  Operand gradient(const TensorView& view, const char* name, const TensorView& model, const char* model_name,
                   bool accumulate) const;
  // f32 [B, H, Sq], packed [H, total].
  Plane per_row(const AttentionProblem& p, const TensorView& view, const char* name) const;
  // [B|1, H|1, Sq|1, Sk|1]
  Plane plane(const AttentionProblem& p, const TensorView& view, const char* name) const;

 private:
  static constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();  // index data is 32-bit

  // Whether index data may be read here: on a GPU it is not, because that would wait for the stream.
  bool readable() const { return q_.device == Device::cpu; }

  // attention_operands.cc
  void operands(AttentionProblem& p) const;
  Scales scales(const TensorView& view, const char* name, const TensorView& data, const char* data_name,
                bool packed) const;
  void all_scales(AttentionProblem& p) const;

  // attention_lengths.cc
  Indices indices(const TensorView& view, const char* name, std::int64_t length) const;
  std::int64_t packed_length(const TensorView& cu, IndexName name, const TensorView& x, IndexName x_name,
                             std::int64_t bound, IndexName bound_name) const;
  void lengths(AttentionProblem& p) const;
  void cache(AttentionProblem& p) const;
  void used(AttentionProblem& p) const;
  void offsets(AttentionProblem& p) const;
  void steps(AttentionProblem& p) const;
  static std::string step_text(const AttentionProblem& p);  // "q_step is 4"
  void positions(const AttentionProblem& p) const;

  // attention_score_options.cc
  void scores(AttentionProblem& p) const;
  void per_head(AttentionProblem& p) const;
  void planes(AttentionProblem& p) const;
  static void longer_columns(AttentionProblem& p, const TensorView& view);
  void draft(AttentionProblem& p) const;

  const Check& check_;
  const AttentionOptions& options_;
  const TensorView &q_, &k_, &v_;
  const KeyNames names_;
  const std::int64_t capacity_;  // KeyStorage
};

}  // namespace heddle
