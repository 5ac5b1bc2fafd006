#include "model/transformer_block_weights.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/dtypes.h"
#include "core/in_quotes.h"
#include "cuda/model.h"
#include "model/layer_formats.h"
#include "model/matrix_part.h"

namespace heddle {
namespace {

using distributed::Range;

// Bounds that keep every product of two sizes far below 2^63.
constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
constexpr std::int64_t kMaxHeadSize = 256;

float rounded_to(float value, DType dtype) {
  if (dtype == DType::f16) return f16_to_f32(f32_to_f16(value));
  return dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(value)) : value;
}

class BlockMaker {
 public:
  explicit BlockMaker(const TransformerBlockOptions& options)
      : options_(checked(options)),
        formats_(check_, options.layers, options.dtype, options.device),
        gpu_(options.device == Device::cuda ? cuda::current_gpu("transformer_block") : -1) {}

  const TransformerBlockOptions& options() const { return options_; }
  int gpu() const { return gpu_; }

  // Rounded to the block's dtype; empty where it is not given and need not be.
  std::vector<float> vector(const TensorView& view, const std::string& name, std::int64_t size, bool required) const {
    if (!view.given() && !required) return {};
    return values(view, name, TensorView(nullptr, DType::f32, {size}), options_.dtype);
  }

  HeldNorm norm(const TensorView& weight, const TensorView& bias, const std::string& name) const {
    check_.require(!bias.given() || options_.norm == Norm::layer_norm, name, "_bias is given and norm is ",
                   name_of(options_.norm), ": only layer_norm has one");
    return {options_.norm, options_.eps, held(vector(weight, name, options_.hidden, true)),
            held(vector(bias, name + "_bias", options_.hidden, false))};
  }

  // A bias of [hidden] that is added to sums over ranks.
  WeightMemory bias(const TensorView& view, const std::string& name) const {
    return held(vector(view, name, options_.hidden, false));
  }

  struct LayerOf {
    const char* name;
    const TensorView &weight, &bias;
    std::int64_t out, in;
    LinearRole role;
    MatrixPart part;  // that is held
  };
  TransformerLinear layer(const LayerOf& of, const cpu::NormParameters& norm = {}) {
    const std::string name = of.name, wanted = formats_.of(name);
    const TransformerLinear::Shape shape{
        .out = of.part.row_count(),
        .in = of.part.columns.size(),
        .dtype = options_.dtype,
        .role = of.role,
        .activation = of.role == LinearRole::activate ? options_.activation : Activation::none,
        .device = options_.device};
    const bool low_bit = !wanted.empty() && !LayerFormats::is_floating(wanted);
    const DType precision = low_bit ? DType::f32 : LayerFormats::precision(wanted, options_.dtype);
    const bool whole = shape.out == of.out && shape.in == of.in;
    std::vector<float> weight = values(of.weight, name, TensorView(nullptr, DType::f32, {of.out, of.in}), precision);
    std::vector<float> bias = vector(of.bias, name + "_bias", of.out, false);
    if (!whole && !bias.empty()) bias = part_of(bias, 1, {of.part.rows, {0, 1}});
    const float* bias_data = bias.empty() ? nullptr : bias.data();
    if (!low_bit) {
      if (!whole) weight = part_of(weight, of.in, of.part);
      return TransformerLinear(shape, weight.data(), bias_data, precision, norm);
    }
    // Of a part, too, the whole is quantised: its codes and scales are then the whole's.
    OwnedMatrix matrix = quantized(check_, name, weight.data(), of.out, of.in, wanted);
    if (!whole) matrix = part_of(matrix.matrix, of.part);
    return TransformerLinear(shape, matrix.matrix, bias_data, norm);
  }

  // Key/value heads, and columns between up and down, of one of several ranks.
  struct Share {
    Range kv_heads, columns;
  };
  Share share(const RankOfBlock& of) {
    const Check check("tensor_parallel_block");
    const std::int64_t kv_heads = options_.kv_heads, columns = options_.intermediate;
    check.require(kv_heads >= of.ranks, "kv_heads is ", kv_heads, " for ", of.ranks, " ranks: each must have one");
    const std::int64_t unit = unit_of("down"), units = (columns + unit - 1) / unit;
    const std::string together =
        unit > 1 ? text(", of which ", formats_.of("down"), " stores ", unit, " together,") : "";
    check.require(units >= of.ranks, "intermediate is ", columns, together, " for ", of.ranks,
                  " ranks: each must have some");
    // Of every rank, so that all refuse what one of them must.
    for (int rank = 0; rank < of.ranks; ++rank) {
      const Range queries = columns_of(distributed::even_range(kv_heads, of.ranks, rank));
      const std::int64_t cut = unit_of("out");
      check.require(queries.begin % cut == 0 && (queries.end % cut == 0 || queries.end == options_.hidden),
                    "the heads of rank ", rank, " of ", of.ranks, " are columns ", queries.begin, " to ", queries.end,
                    " of out: ", formats_.of("out"), " stores ", cut, " columns together, which must not be cut");
    }
    const Range own = distributed::even_range(units, of.ranks, of.rank);
    return {distributed::even_range(kv_heads, of.ranks, of.rank),
            {own.begin * unit, std::min(own.end * unit, columns)}};
  }
  // Of the context those of the query heads that attend with some key/value heads.
  Range columns_of(const Range& kv_heads) const {
    const std::int64_t each = options_.hidden / options_.kv_heads;
    return {kv_heads.begin * each, kv_heads.end * each};
  }

  void require_all_matched() const { formats_.require_all_matched(check_, "qkv, out, up and down"); }

 private:
  static WeightMemory held(const std::vector<float>& values) {
    return values.empty() ? WeightMemory() : WeightMemory(values.data(), values.size(), DType::f32, Device::cpu);
  }

  // Columns of a layer that its format stores together.
  std::int64_t unit_of(const std::string& name) {
    const std::string wanted = formats_.of(name);
    if (wanted.empty() || LayerFormats::is_floating(wanted)) return 1;
    return stored_together(lowbit::format_named(wanted.substr(0, wanted.find(':'))));
  }

  TransformerBlockOptions checked(TransformerBlockOptions o) const {
    const auto size = [&](std::int64_t value, const char* name) {
      check_.require(value >= 1 && value <= kMaxSize, name, " is ", value, ": it must be from 1 to ", kMaxSize);
    };
    size(o.hidden, "hidden");
    size(o.heads, "heads");
    size(o.intermediate, "intermediate");
    check_.require(o.hidden % o.heads == 0, "hidden is ", o.hidden, ": it must be a multiple of heads, ", o.heads);
    check_.require(o.hidden / o.heads <= kMaxHeadSize, "heads of ", o.hidden / o.heads, " elements: at most ",
                   kMaxHeadSize, " are supported; hidden is ", o.hidden, ", heads ", o.heads);
    check_.require(o.kv_heads >= 0 && (o.kv_heads == 0 || o.heads % o.kv_heads == 0), "kv_heads is ", o.kv_heads,
                   ": it must divide heads, ", o.heads, ", or be 0 for as many");
    if (o.kv_heads == 0) o.kv_heads = o.heads;
    check_.require(o.norm == Norm::layer_norm || o.norm == Norm::rms_norm, "norm is ", name_of(o.norm),
                   ": it must be layer_norm or rms_norm");
    check_.require(o.activation > Activation::none && o.activation <= Activation::swiglu, "activation is ",
                   name_of(o.activation), ": it must be relu, gelu_erf, gelu_tanh, silu or swiglu");
    check_.require(o.causal <= Causal::bottom_right, "causal is ", static_cast<int>(o.causal),
                   ": it must be none, top_left or bottom_right");
    check_.require(std::isfinite(o.eps) && o.eps >= 0, "eps is ", static_cast<double>(o.eps),
                   ": it must be finite and not negative");
    const bool gpu = o.device == Device::cuda;
    check_.require(o.dtype == DType::bf16 || o.dtype == (gpu ? DType::f16 : DType::f32), "dtype is ", name_of(o.dtype),
                   gpu ? ": on a GPU it must be float16 or bfloat16" : ": it must be float32 or bfloat16");
    if (!gpu) return o;
    const std::int64_t head = o.hidden / o.heads, qkv = (o.heads + 2 * o.kv_heads) * head;
    check_.require(o.hidden % 8 == 0, "hidden is ", o.hidden, ": on a GPU it must be a multiple of 8");
    check_.require(o.intermediate % 8 == 0, "intermediate is ", o.intermediate,
                   ": on a GPU it must be a multiple of 8");
    check_.require(qkv % 8 == 0, "qkv has (heads + 2 kv_heads) * head = ", qkv, " rows, of heads ", o.heads,
                   ", kv_heads ", o.kv_heads, " and heads of ", head,
                   " elements: on a GPU they must be a multiple of 8");
    return o;
  }

  // Rounded to `dtype`, all finite there.
  std::vector<float> values(const TensorView& view, const std::string& name, const TensorView& expected,
                            DType dtype) const {
    check_.require(view.given(), name, " is missing: it must be ", expected);
    check_.require(view.device == Device::cpu, name, " is on a GPU: a block's weights are given in the CPU's memory");
    check_.require(view.rank == expected.rank && view.shape == expected.shape, name, " is ", view, ": it must be ",
                   expected, " for hidden ", options_.hidden, ", heads ", options_.heads, ", kv_heads ",
                   options_.kv_heads, ", intermediate ", options_.intermediate, " and ", name_of(options_.activation));
    check_.require(view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16, name, " is ",
                   name_of(view.dtype), ": it must be float32, float16 or bfloat16");
    check_.addressable(view, name.c_str());
    std::vector<float> out(static_cast<std::size_t>(view.elements()));
    const std::int64_t columns = view.shape[view.rank - 1], rows = view.elements() / columns;
    const std::int64_t row_stride = view.rank == 2 ? view.stride[0] : 0, stride = view.stride[view.rank - 1];
    float* to = out.data();
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j, ++to) {
        const float value = load_element(view.data, view.dtype, i * row_stride + j * stride);
        *to = rounded_to(value, dtype);
        if (!std::isfinite(*to)) refuse(name, view.rank == 2 ? text(i, ", ", j) : text(j), value, dtype);
      }
    }
    return out;
  }

  void refuse(const std::string& name, const std::string& at, float value, DType dtype) const {
    check_.require(false, name, " holds ", value, " at [", at, "]: weights must be finite in ", name_of(dtype));
  }

  const Check check_{"transformer_block"};
  const TransformerBlockOptions options_;
  LayerFormats formats_;
  const int gpu_;
};

}  // namespace

std::unique_ptr<const TransformerBlock::Weights> TransformerBlock::Weights::make(const TransformerBlockOptions& options,
                                                                                 const TransformerBlockWeights& given,
                                                                                 std::optional<RankOfBlock> shared) {
  BlockMaker maker(options);
  TransformerBlockOptions o = maker.options();
  const BlockMaker::Share share =
      shared ? maker.share(*shared) : BlockMaker::Share{{0, o.kv_heads}, {0, o.intermediate}};
  HeldNorm norm1 = maker.norm(given.norm1, given.norm1_bias, "norm1");
  HeldNorm norm2 = maker.norm(given.norm2, given.norm2_bias, "norm2");
  const auto front = [&](const HeldNorm& norm) { return o.norm_first ? norm.parameters() : cpu::NormParameters(); };
  const std::int64_t h = o.hidden, head = h / o.heads, keys = o.kv_heads * head;
  const std::int64_t rows_of_column = o.activation == Activation::swiglu ? 2 : 1;
  const Range hidden{0, h}, queries = maker.columns_of(share.kv_heads), columns = share.columns;
  const auto of_keys = [&](std::int64_t first) {
    return Range{first + share.kv_heads.begin * head, first + share.kv_heads.end * head};
  };
  // Biases of sums over ranks are added once, to the sums.
  const TensorView none = {};
  const TensorView& out_bias = shared ? none : given.out_bias;
  const TensorView& down_bias = shared ? none : given.down_bias;
  WeightMemory summed_out_bias = shared ? maker.bias(given.out_bias, "out_bias") : WeightMemory();
  WeightMemory summed_down_bias = shared ? maker.bias(given.down_bias, "down_bias") : WeightMemory();
  TransformerLinear qkv = maker.layer({"qkv",
                                       given.qkv,
                                       given.qkv_bias,
                                       h + 2 * keys,
                                       h,
                                       LinearRole::project,
                                       {{queries, of_keys(h), of_keys(h + keys)}, hidden}},
                                      front(norm1));
  TransformerLinear out = maker.layer({"out", given.out, out_bias, h, h, LinearRole::sum, {{hidden}, queries}});
  TransformerLinear up = maker.layer({"up",
                                      given.up,
                                      given.up_bias,
                                      rows_of_column * o.intermediate,
                                      h,
                                      LinearRole::activate,
                                      {{{rows_of_column * columns.begin, rows_of_column * columns.end}}, hidden}},
                                     front(norm2));
  TransformerLinear down =
      maker.layer({"down", given.down, down_bias, h, o.intermediate, LinearRole::sum, {{hidden}, columns}});
  maker.require_all_matched();
  if (o.norm_first) {  // the layers have copied them
    norm1 = HeldNorm();
    norm2 = HeldNorm();
  }
  for (WeightMemory* held : {&norm1.weight, &norm1.bias, &norm2.weight, &norm2.bias}) held->move_to(o.device);
  o.heads = queries.size() / head;
  o.kv_heads = share.kv_heads.size();
  o.intermediate = columns.size();
  return std::unique_ptr<const Weights>(new Weights{
      o, head, share.kv_heads, columns, std::move(qkv), std::move(out), std::move(up), std::move(down),
      std::move(norm1), std::move(norm2), std::move(summed_out_bias), std::move(summed_down_bias), maker.gpu()});
}

std::vector<EncoderLayerInfo> TransformerBlock::Weights::layers() const {
  std::vector<EncoderLayerInfo> found;
  const std::pair<const char*, const TransformerLinear*> all[] = {
      {"qkv", &qkv}, {"out", &out}, {"up", &up}, {"down", &down}};
  for (const auto& [name, layer] : all) {
    found.push_back(
        {name, layer->format(), layer->shape().out, layer->shape().in, layer->weight_bytes(), layer->packing_error()});
  }
  return found;
}

std::size_t TransformerBlock::Weights::bytes() const {
  std::size_t bytes = out_bias.size() + down_bias.size();
  for (const EncoderLayerInfo& layer : layers()) bytes += layer.weight_bytes;
  for (const HeldNorm* norm : {&norm1, &norm2}) bytes += norm->weight.size() + norm->bias.size();
  return bytes;
}

}  // namespace heddle
