// Layers of adaptive sparse attention and their arguments' checks; asam_call.cc runs a layer.
#include "heddle/asam.h"

#include <utility>

#include "core/names.h"
#include "core/runtime.h"
#include "cpu/kernels.h"
#include "model/asam_call.h"
#include "ops/attention/arguments.h"

namespace heddle {
namespace {

constexpr NamedValue<AsamPattern> kPatterns[] = {{"local", AsamPattern::local},
                                                 {"strided", AsamPattern::strided},
                                                 {"random", AsamPattern::random},
                                                 {"clustered", AsamPattern::clustered},
                                                 {"hierarchical", AsamPattern::hierarchical},
                                                 {"adaptive", AsamPattern::adaptive}};
constexpr NamedValue<AsamGate> kGates[] = {{"hard", AsamGate::hard}, {"soft", AsamGate::soft}};

constexpr const char* kLayer = "asam_layer";
constexpr const char* kEncoder = "asam_encoder";

// Of a call over [batch, length, dim].
void check_sizes(const Check& check, std::int64_t batch, std::int64_t length) {
  check.require(batch >= 1, "batch is ", batch, ": it must be at least 1");
  check.require(length >= 1, "length is ", length, ": it must be at least 1");
  check.require(length <= INT32_MAX / batch, "batch is ", batch, " and length ", length,
                ": their product must be below 2^31");
}

// What a call of layers like `config` has: x and y, lengths, and an info of each layer.
struct Arguments {
  const TensorView &x, &y, &lengths;
  std::span<const AsamInfo> infos;
};

class ArgumentChecks {
 public:
  ArgumentChecks(const Check& check, const AsamConfig& config, const Arguments& given)
      : check_(check), config_(config), given_(given) {}

  void run() {
    rows(given_.x, "x");
    batch_ = given_.x.shape[0];
    length_ = given_.x.shape[1];
    check_.require(batch_ >= 1 && length_ >= 1, "x is ", given_.x, ": it must be [B, T, ", config_.dim,
                   "], B and T from 1 up");
    check_.require(length_ <= INT32_MAX / batch_, "x is ", given_.x, ": B * T must be below 2^31");
    rows(given_.y, "y");
    check_.require(given_.y.shape == given_.x.shape, "y is ", given_.y, ": it must be ", given_.x, ", as x");
    check_.not_overlapping(given_.y, "y");
    lengths();
    for (const AsamInfo& info : given_.infos) this->info(info);
    apart();
  }

 private:
  void on_cpu(const TensorView& view, const char* name) const {
    check_.require(!view.given() || view.device == Device::cpu, name,
                   " is on a GPU: these layers run on the CPU alone; on GPUs heddle.nn.ASAMLayer does, in Python");
  }
  void rows(const TensorView& view, const char* name) const {
    on_cpu(view, name);
    check_.tensor(view, name, DType::f32, Device::cpu, 3, "x");
    check_.require(view.shape[2] == config_.dim, name, " is ", view, ": it must be [B, T, ", config_.dim,
                   "], the configuration's dim");
    check_.require(view.shape[2] == 1 || view.stride[2] == 1, name, "'s last dimension has stride ", view.stride[2],
                   ": it must be 1");
  }
  void lengths() const {
    const TensorView& view = given_.lengths;
    if (!view.given()) return;
    on_cpu(view, "lengths");
    check_.tensor(view, "lengths", DType::i32, Device::cpu, 1, "x");
    check_.require(view.shape[0] == batch_, "lengths is ", view, ": it must be [B], [", batch_, "]");
    check_.require(view.contiguous(), "lengths must be contiguous");
    for (std::int64_t b = 0; b < batch_; ++b) {
      const std::int32_t used = static_cast<const std::int32_t*>(view.data)[b];
      check_.require(used >= 1 && used <= length_, "lengths[", b, "] is ", used, ": it must be from 1 to T, ", length_);
    }
  }
  // Of `expected`'s dtype and shape, if it is given.
  void output(const TensorView& view, const char* name, const TensorView& expected, bool there,
              const char* rule) const {
    if (!view.given()) return;
    check_.require(there, name, " is given and ", rule);
    on_cpu(view, name);
    check_.tensor(view, name, expected.dtype, Device::cpu, expected.rank, "x");
    check_.require(view.shape == expected.shape, name, " is ", view, ": it must be ", expected);
    check_.require(view.contiguous(), name, " must be contiguous");
  }
  void info(const AsamInfo& info) const {
    constexpr const char* kNoGate = "use_adaptive_gate is false: there is no gate";
    const std::int64_t B = batch_, T = length_, H = config_.num_heads,
                       N = (T + config_.block_size - 1) / config_.block_size;
    const bool gate = config_.use_adaptive_gate;
    const auto either = [&](DType dtype, std::initializer_list<std::int64_t> causal,
                            std::initializer_list<std::int64_t> whole) {
      return TensorView(nullptr, dtype, config_.causal ? causal : whole);
    };
    output(info.gate_values, "gate_values", TensorView(nullptr, DType::f32, {B, H, T}), gate, kNoGate);
    output(info.confidence, "confidence", either(DType::f32, {B, H, T}, {B, H}), gate, kNoGate);
    output(info.pattern_logits, "pattern_logits", either(DType::f32, {B, T, kAsamChoices}, {B, kAsamChoices}), gate,
           kNoGate);
    output(info.patterns, "patterns", either(DType::i32, {B, H, N}, {B, H}),
           config_.pattern_type == AsamPattern::adaptive,
           "pattern_type is not adaptive: all heads have the one that it names");
    output(info.sparse_ratio, "sparse_ratio", TensorView(nullptr, DType::f32, {1}), true, "");
  }
  // Outputs share no memory with each other and with lengths; x is copied before anything is written.
  void apart() const {
    std::vector<Named> outputs = {{"y", &given_.y}};
    for (const AsamInfo& info : given_.infos) {
      outputs.insert(outputs.end(), {{"gate_values", &info.gate_values},
                                     {"confidence", &info.confidence},
                                     {"pattern_logits", &info.pattern_logits},
                                     {"patterns", &info.patterns},
                                     {"sparse_ratio", &info.sparse_ratio}});
    }
    const Named inputs[] = {{"lengths", &given_.lengths}};
    check_apart(check_, outputs, inputs);
  }

  const Check& check_;
  const AsamConfig& config_;
  const Arguments& given_;
  std::int64_t batch_ = 0, length_ = 0;
};

}  // namespace

AsamPattern asam_pattern_named(std::string_view name) { return value_named(kPatterns, name, "asam", "pattern_type"); }
const char* name_of(AsamPattern pattern) { return name_in(kPatterns, pattern); }
AsamGate asam_gate_named(std::string_view name) { return value_named(kGates, name, "asam", "gate"); }
const char* name_of(AsamGate gate) { return name_in(kGates, gate); }

AsamLayer::AsamLayer(std::unique_ptr<const Weights> weights) : weights_(std::move(weights)) {}
AsamLayer::AsamLayer(AsamLayer&&) noexcept = default;
AsamLayer& AsamLayer::operator=(AsamLayer&&) noexcept = default;
AsamLayer::~AsamLayer() = default;

AsamLayer::AsamLayer(const AsamConfig& config, const AsamState& state) {
  const Check check(kLayer);
  AsamStateReader reader(check, state);
  weights_ = Weights::make(check, config, reader);
  reader.require_no_others("a layer");
}

AsamLayer::AsamLayer(const AsamConfig& config, const SafeTensors& file, const std::string& prefix)
    : AsamLayer(config, asam_state(Check(kLayer), file, prefix)) {}

AsamLayer AsamLayer::load(const AsamConfig& config, const std::string& path, const std::string& prefix) {
  return AsamLayer(config, SafeTensors::open(path), prefix);
}

const AsamConfig& AsamLayer::config() const { return weights_->config; }
std::size_t AsamLayer::weight_bytes() const { return weights_->bytes(); }

std::size_t AsamLayer::workspace(std::int64_t batch, std::int64_t length, const Runtime& runtime) const {
  check_sizes(Check("asam_layer_workspace"), batch, length);
  return Call(*weights_, batch, length, executor_of(runtime)).workspace();
}

void AsamLayer::forward(const TensorView& x, const TensorView& y, const AsamOptions& options, const AsamInfo& info,
                        const Runtime& runtime) const {
  const Check check(kLayer);
  ArgumentChecks(check, config(), {x, y, options.lengths, {&info, 1}}).run();
  Call call(*weights_, x.shape[0], x.shape[1], executor_of(runtime));
  check_workspace(check, runtime.workspace, call.workspace(), "AsamLayer::workspace() says how many");
  call.run(x, y, options, info, static_cast<std::byte*>(runtime.workspace.data));
}

struct AsamEncoder::Parts {
  std::vector<AsamLayer> layers;
  HeldNorm norm;
};

AsamEncoder::AsamEncoder(AsamEncoder&&) noexcept = default;
AsamEncoder& AsamEncoder::operator=(AsamEncoder&&) noexcept = default;
AsamEncoder::~AsamEncoder() = default;

AsamEncoder::AsamEncoder(const AsamConfig& config, std::int64_t num_layers, const AsamState& state) {
  const Check check(kEncoder);
  check.require(num_layers >= 1, "num_layers is ", num_layers, ": it must be at least 1");
  check_asam_config(check, config);
  AsamStateReader reader(check, state);
  std::vector<AsamLayer> layers;
  for (std::int64_t i = 0; i < num_layers; ++i) {
    layers.push_back(AsamLayer(AsamLayer::Weights::make(check, config, reader, text("layers.", i, "."))));
  }
  HeldNorm norm = reader.norm("norm", config.dim);
  reader.require_no_others("an encoder");
  parts_ = std::unique_ptr<const Parts>(new Parts{std::move(layers), std::move(norm)});
}

AsamEncoder::AsamEncoder(const AsamConfig& config, std::int64_t num_layers, const SafeTensors& file,
                         const std::string& prefix)
    : AsamEncoder(config, num_layers, asam_state(Check(kEncoder), file, prefix)) {}

AsamEncoder AsamEncoder::load(const AsamConfig& config, std::int64_t num_layers, const std::string& path,
                              const std::string& prefix) {
  return AsamEncoder(config, num_layers, SafeTensors::open(path), prefix);
}

std::span<const AsamLayer> AsamEncoder::layers() const { return parts_->layers; }

std::size_t AsamEncoder::weight_bytes() const {
  std::size_t bytes = parts_->norm.weight.size() + parts_->norm.bias.size();
  for (const AsamLayer& layer : parts_->layers) bytes += layer.weight_bytes();
  return bytes;
}

// Layers have the same configuration, so that one's workspace is each one's.
std::size_t AsamEncoder::workspace(std::int64_t batch, std::int64_t length, const Runtime& runtime) const {
  check_sizes(Check("asam_encoder_workspace"), batch, length);
  return AsamLayer::Call(*parts_->layers[0].weights_, batch, length, executor_of(runtime)).workspace();
}

void AsamEncoder::forward(const TensorView& x, const TensorView& y, const AsamOptions& options,
                          std::span<const AsamInfo> infos, const Runtime& runtime) const {
  const Check check(kEncoder);
  const std::vector<AsamLayer>& layers = parts_->layers;
  check.require(infos.empty() || infos.size() == layers.size(), "infos has ", infos.size(),
                " elements: it must have one for each of ", layers.size(), " layers, or none");
  const AsamConfig& config = layers[0].config();
  ArgumentChecks(check, config, {x, y, options.lengths, infos}).run();
  Executor& executor = executor_of(runtime);
  const std::int64_t batch = x.shape[0], length = x.shape[1];
  for (std::size_t i = 0; i < layers.size(); ++i) {
    AsamLayer::Call call(*layers[i].weights_, batch, length, executor);
    check_workspace(check, runtime.workspace, call.workspace(), "AsamEncoder::workspace() says how many");
    call.run(i == 0 ? x : y, y, options, infos.empty() ? AsamInfo() : infos[i],
             static_cast<std::byte*>(runtime.workspace.data));
  }
  over_rows(executor, batch * length, [&](std::int64_t first, std::int64_t rows, int) {
    for (std::int64_t i = first; i < first + rows; ++i) {
      auto* row = reinterpret_cast<std::byte*>(static_cast<float*>(y.data) + i / length * y.stride[0] +
                                               i % length * y.stride[1]);
      cpu::kernels().linear.norm_row(parts_->norm.parameters(), row, DType::f32, config.dim, row, DType::f32);
    }
  });
}

}  // namespace heddle
