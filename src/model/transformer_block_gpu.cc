#include <algorithm>

#include "cuda/model.h"
#include "model/transformer_block_call.h"

namespace heddle {

TransformerBlock::GpuCall::GpuCall(const Weights& weights, std::int64_t total, std::int64_t sequences,
                                   std::int64_t longest)
    : weights_(weights),
      options_(weights.options),
      attention_(weights.attention()),
      total_(total),
      longest_(longest),
      rows_({.total = total,
             .hidden = options_.hidden,
             .qkv = attention_.columns(),
             .intermediate = options_.intermediate,
             .element = size_of(options_.dtype)},
            scratch_bytes(sequences), places_) {}

std::size_t TransformerBlock::GpuCall::scratch_bytes(std::int64_t sequences) const {
  std::size_t bytes = attention_.gpu_workspace(total_, sequences, longest_);
  for (const TransformerLinear* layer : {&weights_.qkv, &weights_.out, &weights_.up, &weights_.down}) {
    bytes = std::max(bytes, layer->gpu_workspace(total_));
  }
  return bytes;
}

// Norms in front, biases, activations and residuals are the layers' own. y is written by the last step alone, and x
// read by those before: so y may be x.
void TransformerBlock::GpuCall::run(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y,
                                    const Runtime& given) const {
  using Rows = TransformerLinear::GpuRows;
  auto* const memory = static_cast<std::byte*>(given.workspace.data);
  Runtime runtime = given;
  runtime.workspace = {memory + rows_.scratch, rows_.scratch_bytes};
  runtime.validate = false;  // the call has asked for the checks, under its own names
  const std::int64_t hidden = options_.hidden;
  // A single row may have any stride.
  const auto outside = [&](const TensorView& view) {
    return Rows{static_cast<std::byte*>(view.data), total_ > 1 ? view.stride[0] : hidden};
  };
  const Rows from = outside(x), to = outside(y), stream{memory + rows_.x, hidden};
  const Rows qkv{memory + rows_.qkv, attention_.columns()}, context{memory + rows_.context, hidden};
  const Rows activated{memory + rows_.activated, options_.intermediate};
  const auto norm = [&](const HeldNorm& held, const Rows& rows) {
    const cpu::NormParameters parameters = held.parameters();
    cuda::norm_rows(stream.data,
                    {.dtype = options_.dtype,
                     .kind = parameters.kind,
                     .rows = total_,
                     .columns = hidden,
                     .weight = parameters.weight,
                     .bias = parameters.bias,
                     .epsilon = static_cast<float>(parameters.eps),
                     .y = rows.data,
                     .y_stride = rows.stride},
                    runtime.stream);
  };

  weights_.qkv.run_on_gpu(from, {}, qkv, total_, runtime);
  attention_.run(total_, cu_seqlens, longest_, qkv.data, context.data, runtime);
  weights_.out.run_on_gpu(context, from, stream, total_, runtime);
  if (!options_.norm_first) norm(weights_.norm1, stream);
  weights_.up.run_on_gpu(stream, {}, activated, total_, runtime);
  weights_.down.run_on_gpu(activated, stream, options_.norm_first ? to : stream, total_, runtime);
  if (!options_.norm_first) norm(weights_.norm2, to);
}

}  // namespace heddle
