#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "core/runtime.h"
#include "cuda/model.h"
#include "heddle/transformer.h"
#include "model/cpu_workspace.h"
#include "model/encoder_call.h"
#include "model/packed_lengths.h"
#include "ops/attention/arguments.h"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Thread time of the stages that run fused over a block of rows, for one worker.
struct alignas(64) StageTimes {
  double embedding, linear, norm_and_activation;
};

// Adds the time since the last lap to a stage; free when times are not wanted.
class Laps {
 public:
  explicit Laps(bool wanted) : wanted_(wanted) {
    if (wanted_) last_ = Clock::now();
  }
  void add(double& stage) {
    if (!wanted_) return;
    const Clock::time_point now = Clock::now();
    stage += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  bool wanted_;
  Clock::time_point last_;
};

// Where everything lies in the workspace; of each worker:
struct Arrangement : CpuRowPlaces {
  std::size_t times = 0;      // StageTimes
  std::size_t wide = 0;       // f32 [kLinearRows, intermediate]
  std::size_t projected = 0;  // f32 [kLinearRows, hidden]
  std::size_t activated = 0;  // bf16 [kLinearRows, intermediate], or `wide` for f32
  std::size_t linear = 0;     // scratch of a linear layer
};

}  // namespace

class Encoder::CpuCall : public Call {
 public:
  CpuCall(const Weights& weights, std::int64_t total, std::int64_t sequences, const Runtime& runtime)
      : Call(weights, total, sequences), executor_(executor_of(runtime)) {}

  std::size_t workspace(const TensorView& cu_seqlens, std::int64_t longest) const {
    return workspace(attention_bytes(cu_seqlens, longest));
  }
  std::size_t workspace(std::size_t attention_bytes) const { return arrange(attention_bytes).bytes; }

  std::size_t attention_bytes(const TensorView& cu_seqlens, std::int64_t longest) const {
    if (total_ == 0) return 0;
    Runtime runtime;
    runtime.executor = &executor_;
    return attention_.workspace(total_, cu_seqlens, longest, runtime);
  }

  void run(const EncoderTask& task, std::byte* workspace, EncoderTimes* times) {
    workspace_ = workspace;
    const TensorView& cu_seqlens = task.cu_seqlens;
    plan_ = arrange(attention_bytes(cu_seqlens, task.longest));
    timed_ = times != nullptr;
    for (int worker = 0; worker < executor_.workers(); ++worker) stage_times(worker) = {};
    if (times != nullptr) *times = {};

    auto start = Clock::now();
    if (total_ > 0) {
      embed(static_cast<const std::int32_t*>(task.token_ids.data), static_cast<const std::int32_t*>(cu_seqlens.data));
      Runtime runtime;
      runtime.executor = &executor_;
      runtime.workspace = {workspace_ + plan_.attention, plan_.attention_bytes};
      double attention = 0;
      for (std::size_t i = 0; i < weights_.layers.size(); ++i) {
        const auto attention_start = Clock::now();
        attention_.run(total_, cu_seqlens, task.longest, workspace_ + plan_.qkv, workspace_ + plan_.context, runtime);
        attention += seconds_since(attention_start);
        finish_layer(i, task.hidden_states);
      }
      if (times != nullptr) share_times(seconds_since(start) - attention, attention, *times);
    }
    start = Clock::now();
    pool(cu_seqlens, task.embeddings, task.normalize);
    if (times != nullptr) times->pooling = seconds_since(start);
  }

 private:
  Arrangement arrange(std::size_t attention_bytes) const {
    const std::int64_t hidden = config_.hidden;
    Arrangement plan{{{.total = total_, .hidden = hidden, .qkv = 3 * hidden, .element = element_}, attention_bytes}};
    const auto intermediate = static_cast<std::size_t>(config_.intermediate);

    CpuPlaces of_worker;
    std::size_t linear_bytes = 0;
    for (const EncoderLayer& layer : weights_.layers) {
      linear_bytes = std::max(linear_bytes, layer.qkv.scratch_bytes());
      for (const TransformerLinear* linear : {&layer.attention_output, &layer.intermediate, &layer.output}) {
        linear_bytes = std::max(linear_bytes, linear->scratch_bytes());
      }
    }
    plan.times = of_worker.take(sizeof(StageTimes));
    plan.wide = of_worker.take(sizeof(float) * kLinearRows * intermediate);
    plan.projected = of_worker.take(sizeof(float) * kLinearRows * static_cast<std::size_t>(hidden));
    plan.activated = dtype_ == DType::f32 ? plan.wide : of_worker.take(element_ * kLinearRows * intermediate);
    plan.linear = of_worker.take(linear_bytes);
    plan.deal_out(of_worker.bytes(), executor_.workers());
    return plan;
  }

  std::byte* worker_at(int worker) const { return workspace_ + plan_.workers + plan_.worker_bytes * worker; }
  StageTimes& stage_times(int worker) const { return *reinterpret_cast<StageTimes*>(worker_at(worker) + plan_.times); }
  std::byte* row(std::size_t buffer, std::int64_t index, std::int64_t columns) const {
    return workspace_ + buffer + static_cast<std::size_t>(index * columns) * element_;
  }

  void embed(const std::int32_t* ids, const std::int32_t* cu_seqlens) const {
    const std::size_t row_bytes = config_.hidden * element_;
    over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
      Laps laps(timed_);
      auto* sums = reinterpret_cast<float*>(worker_at(worker) + plan_.projected);
      // The sequence that the first row is in: the last one that begins at or before it.
      std::int64_t sequence = std::upper_bound(cu_seqlens, cu_seqlens + sequences_ + 1, first) - cu_seqlens - 1;
      for (std::int64_t i = 0; i < rows; ++i) {
        while (first + i >= cu_seqlens[sequence + 1]) ++sequence;
        const std::int64_t position = first + i - cu_seqlens[sequence];
        add_three(weights_.word.data() + ids[first + i] * row_bytes, weights_.position.data() + position * row_bytes,
                  weights_.token_type.data(), config_.hidden, dtype_, sums + i * config_.hidden);
      }
      std::byte* x = row(plan_.x, first, config_.hidden);
      residual_layer_norm(sums, nullptr, rows, weights_.embedding_norm.rows(), dtype_, x);
      StageTimes& times = stage_times(worker);
      laps.add(times.embedding);
      weights_.layers[0].qkv.run(x, row(plan_.qkv, first, 3 * config_.hidden), rows, worker_at(worker) + plan_.linear);
      laps.add(times.linear);
    });
  }

  // All of layer `index` after its attention, and the next layer's queries, keys and values, while the rows are in
  // cache.
  void finish_layer(std::size_t index, const TensorView& hidden_states) const {
    const EncoderLayer& layer = weights_.layers[index];
    const bool last = index + 1 == weights_.layers.size();
    over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
      std::byte* scratch = worker_at(worker);
      std::byte* wide = scratch + plan_.wide;
      std::byte* projected = scratch + plan_.projected;
      std::byte* activated = scratch + plan_.activated;
      std::byte* x = row(plan_.x, first, config_.hidden);
      StageTimes& times = stage_times(worker);
      Laps laps(timed_);
      // y = layer_norm(input W^T + b + x) into x; low-bit layers have added x already.
      const auto add_and_norm = [&](const TransformerLinear& linear, const LayerNormWeights& norm,
                                    const std::byte* input) {
        linear.run(input, x, projected, config_.hidden, rows, scratch + plan_.linear);
        laps.add(times.linear);
        residual_layer_norm(reinterpret_cast<float*>(projected), linear.fused() ? nullptr : x, rows, norm.rows(),
                            dtype_, x);
      };
      add_and_norm(layer.attention_output, layer.attention_norm, row(plan_.context, first, config_.hidden));
      laps.add(times.norm_and_activation);
      const bool fused = layer.intermediate.fused();
      layer.intermediate.run(x, nullptr, fused ? activated : wide, config_.intermediate, rows, scratch + plan_.linear);
      laps.add(times.linear);
      if (!fused) gelu(reinterpret_cast<const float*>(wide), rows * config_.intermediate, dtype_, activated);
      laps.add(times.norm_and_activation);
      add_and_norm(layer.output, layer.output_norm, activated);
      if (last && hidden_states.given()) {
        auto* out = static_cast<float*>(hidden_states.data) + first * config_.hidden;
        if (dtype_ == DType::bf16) {
          widen(reinterpret_cast<const std::uint16_t*>(x), rows * config_.hidden, out);
        } else {
          std::memcpy(out, x, sizeof(float) * rows * config_.hidden);
        }
      }
      laps.add(times.norm_and_activation);
      if (!last) {
        weights_.layers[index + 1].qkv.run(x, row(plan_.qkv, first, 3 * config_.hidden), rows, scratch + plan_.linear);
        laps.add(times.linear);
      }
    });
  }

  void pool(const TensorView& cu_seqlens, const TensorView& embeddings, bool normalize) const {
    const auto* offsets = static_cast<const std::int32_t*>(cu_seqlens.data);
    parallel_for(executor_, sequences_, [&](std::int64_t sequence, int) {
      float* mean = static_cast<float*>(embeddings.data) + sequence * config_.hidden;
      std::fill_n(mean, config_.hidden, 0.0f);
      const std::int64_t begin = offsets[sequence], end = offsets[sequence + 1];
      for (std::int64_t i = begin; i < end; ++i) {
        accumulate(row(plan_.x, i, config_.hidden), config_.hidden, dtype_, mean);
      }
      if (begin == end) return;
      double squares = 0;
      for (std::int64_t j = 0; j < config_.hidden; ++j) {
        mean[j] /= static_cast<float>(end - begin);
        squares += static_cast<double>(mean[j]) * mean[j];
      }
      if (!normalize) return;
      const auto length = static_cast<float>(std::max(std::sqrt(squares), 1e-12));
      for (std::int64_t j = 0; j < config_.hidden; ++j) mean[j] /= length;
    });
  }

  // Divides the wall time of the fused stages by the workers' time in each.
  void share_times(double fused, double attention, EncoderTimes& times) const {
    StageTimes sum{};
    for (int worker = 0; worker < executor_.workers(); ++worker) {
      const StageTimes& one = stage_times(worker);
      sum.embedding += one.embedding;
      sum.linear += one.linear;
      sum.norm_and_activation += one.norm_and_activation;
    }
    const double all = sum.embedding + sum.linear + sum.norm_and_activation;
    const double share = all > 0 ? fused / all : 0;
    times.embedding = sum.embedding * share;
    times.linear = sum.linear * share;
    times.norm_and_activation = sum.norm_and_activation * share;
    times.attention = attention;
  }

  Executor& executor_;
  std::byte* workspace_ = nullptr;
  Arrangement plan_;
  bool timed_ = false;
};

Encoder::Encoder(std::unique_ptr<Weights> weights) : weights_(std::move(weights)) {}
Encoder::Encoder(Encoder&&) noexcept = default;
Encoder& Encoder::operator=(Encoder&&) noexcept = default;
Encoder::~Encoder() = default;

Encoder Encoder::load(const std::string& folder, const EncoderOptions& options) {
  return Encoder(Weights::load(folder, options));
}

const EncoderConfig& Encoder::config() const { return weights_->config; }

Device Encoder::device() const { return weights_->options.device; }

std::size_t Encoder::weight_bytes() const { return weights_->bytes(); }

std::vector<EncoderLayerInfo> Encoder::layers() const {
  std::vector<EncoderLayerInfo> out;
  for (std::size_t i = 0; i < weights_->layers.size(); ++i) {
    const EncoderLayer& layer = weights_->layers[i];
    const std::string prefix = EncoderLayers::prefix(static_cast<std::int64_t>(i));
    const std::int64_t hidden = weights_->config.hidden;
    for (int part = 0; part < 3; ++part) {
      out.push_back({prefix + EncoderLayers::kProjections[part], layer.qkv.format(part), hidden, hidden,
                     layer.qkv.weight_bytes(part), layer.qkv.packing_error(part)});
    }
    for (const auto& [linear, name] : {std::pair{&layer.attention_output, EncoderLayers::kAttentionOutput},
                                       {&layer.intermediate, EncoderLayers::kIntermediate},
                                       {&layer.output, EncoderLayers::kOutput}}) {
      out.push_back({prefix + name, linear->format(), linear->shape().out, linear->shape().in, linear->weight_bytes(),
                     linear->packing_error()});
    }
  }
  return out;
}

std::size_t Encoder::workspace(std::int64_t total, std::int64_t sequences, std::int64_t longest,
                               const Runtime& runtime) const {
  const Check check("encoder_workspace");
  check.require(total >= 0 && total <= INT32_MAX, "total is ", total, ": it must be from 0 to 2^31 - 1");
  check.require(sequences >= 0 && sequences < INT32_MAX, "sequences is ", sequences, ": it must be from 0 to 2^31 - 2");
  check.require(longest >= 0 && longest <= weights_->config.positions, "longest is ", longest,
                ": it must be from 0 to ", weights_->config.positions, ", the length of the position table");
  check.require(total == 0 || longest > 0, "longest is 0: ", total, " tokens need a longer sequence");
  check.require(total == 0 || (total - 1) / longest < sequences, sequences, " sequences of at most ", longest,
                " tokens cannot hold ", total);
  if (weights_->gpu >= 0) return GpuCall(*weights_, total, sequences, longest).workspace();
  const CpuCall call(*weights_, total, sequences, runtime);
  if (total == 0) return call.workspace(0);
  const auto attention_bytes = [&](const std::vector<std::int32_t>& cu_seqlens) {
    const auto count = static_cast<std::int64_t>(cu_seqlens.size()) - 1;
    return CpuCall(*weights_, cu_seqlens.back(), count, runtime)
        .attention_bytes(TensorView(cu_seqlens.data(), DType::i32, {count + 1}), std::min(longest, total));
  };
  return call.workspace(
      most_attention_bytes(total, sequences, longest, executor_of(runtime).workers(), attention_bytes));
}

void Encoder::encode(const TensorView& token_ids, const TensorView& cu_seqlens, const TensorView& embeddings,
                     const TensorView& hidden_states, bool normalize, const Runtime& runtime,
                     EncoderTimes* times) const {
  const Check check("encode");
  const EncoderConfig& config = weights_->config;
  const bool gpu = weights_->gpu >= 0;
  const auto contiguous = [&](const TensorView& view, const char* name, DType dtype, int rank, bool output = false) {
    const Device device = output ? this->device() : Device::cpu;
    check.require(view.device == device, name, " must be on the ",
                  device == Device::cpu ? "CPU" : "GPU, as the encoder is");
    check.tensor(view, name, dtype, device, rank);
    check.require(view.contiguous(), name, " must be contiguous; found ", name, " ", view, " with other strides");
  };
  contiguous(token_ids, "token_ids", DType::i32, 1);
  contiguous(cu_seqlens, "cu_seqlens", DType::i32, 1);
  contiguous(embeddings, "embeddings", DType::f32, 2, true);
  const std::int64_t total = token_ids.shape[0], sequences = cu_seqlens.shape[0] - 1;
  check.require(total <= INT32_MAX, "token_ids has ", total, " tokens: at most 2^31 - 1 can be packed");
  check.require(sequences >= 0, "cu_seqlens is empty: it holds one offset more than sequences");
  check.require(embeddings.shape[0] == sequences && embeddings.shape[1] == config.hidden, "embeddings is ", embeddings,
                ": it must be [", sequences, ", ", config.hidden, "], one row a sequence");
  if (hidden_states.given()) {
    contiguous(hidden_states, "hidden_states", DType::f32, 2, true);
    check.require(hidden_states.shape[0] == total && hidden_states.shape[1] == config.hidden, "hidden_states is ",
                  hidden_states, ": it must be [", total, ", ", config.hidden, "], one row a token");
  }
  const Named outputs[] = {{"embeddings", &embeddings}, {"hidden_states", &hidden_states}};
  const Named inputs[] = {{"token_ids", &token_ids}, {"cu_seqlens", &cu_seqlens}};
  check_apart(check, outputs, inputs);

  const auto* offsets = static_cast<const std::int32_t*>(cu_seqlens.data);
  check.require(offsets[0] == 0, "cu_seqlens begins with ", offsets[0], ": it must begin with 0");
  std::int64_t longest = 0;
  for (std::int64_t i = 0; i < sequences; ++i) {
    const std::int64_t length = std::int64_t{offsets[i + 1]} - offsets[i];
    check.require(length >= 0, "cu_seqlens decreases from ", offsets[i], " to ", offsets[i + 1], " at sequence ", i);
    check.require(length <= config.positions, "sequence ", i, " has ", length, " tokens: the position table ends at ",
                  config.positions);
    longest = std::max(longest, length);
  }
  check.require(offsets[sequences] == total, "cu_seqlens ends with ", offsets[sequences], ": it must end with ", total,
                ", the number of tokens");
  const auto* ids = static_cast<const std::int32_t*>(token_ids.data);
  for (std::int64_t i = 0; i < total; ++i) {
    check.require(ids[i] >= 0 && ids[i] < config.vocabulary, "token_ids holds ", ids[i], " at ", i,
                  ": ids are from 0 to ", config.vocabulary - 1);
  }

  if (gpu) {
    const int current = cuda::current_gpu("encode");
    check.require(current == weights_->gpu, "GPU ", current, " is current and the encoder was loaded to GPU ",
                  weights_->gpu);
    check.require(times == nullptr, "times is given: a call on a GPU does not wait for its stages");
    check.require(reinterpret_cast<std::uintptr_t>(hidden_states.data) % 16 == 0,
                  "hidden_states must be aligned to 16 bytes");
  }
  const EncoderTask task{token_ids, cu_seqlens, embeddings, hidden_states, longest, normalize};
  const auto run = [&](auto& call, std::size_t needed, const auto&... rest) {
    check_workspace(check, runtime.workspace, needed, "as Encoder::workspace() says");
    call.run(task, rest...);
  };
  if (gpu) {
    GpuCall call(*weights_, total, sequences, longest);
    run(call, call.workspace(), runtime);
  } else {
    CpuCall call(*weights_, total, sequences, runtime);
    run(call, call.workspace(cu_seqlens, longest), static_cast<std::byte*>(runtime.workspace.data), times);
  }
}

}  // namespace heddle
