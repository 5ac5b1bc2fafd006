// Layers of adaptive sparse attention: against plain loops in double precision, and against the Python layer.
#include "heddle/asam.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "heddle/safetensors.h"
#include "kit/host_tensor.h"
#include "kit/plain_asam.h"
#include "unit/asam_model.h"
#include "unit/model_expected.h"

namespace heddle {
namespace {

using kit::AsamInput;
using kit::AsamResult;
using kit::AsamTensors;
using kit::HostTensor;
using kit::PlainAsam;
using test::asam_config;
using test::asam_input;
using test::asam_tensors;
using test::ExpectedTensor;
using test::views_of;

struct Storage {
  std::vector<std::byte> memory;
  Workspace workspace;
  explicit Storage(std::size_t bytes) : memory(bytes + 128, std::byte{0xFF}) {  // NaN, which must not matter
    const auto at = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
    workspace = {reinterpret_cast<void*>(at), bytes};
  }
  bool intact() const {
    const auto* end = static_cast<const std::byte*>(workspace.data) + workspace.bytes;
    return std::all_of(end, memory.data() + memory.size(), [](std::byte b) { return b == std::byte{0xFF}; });
  }
};

// Memory for all that a layer of this configuration says.
struct InfoTensors {
  HostTensor gate_values, confidence, pattern_logits, patterns, sparse_ratio;

  InfoTensors(const AsamConfig& c, const AsamInput& input) : sparse_ratio(HostTensor::output(DType::f32, {1})) {
    const std::int64_t B = input.batch, T = input.length, H = c.num_heads, N = (T + c.block_size - 1) / c.block_size;
    const auto of = [&](DType dtype, std::vector<std::int64_t> causal, std::vector<std::int64_t> whole) {
      return HostTensor::output(dtype, c.causal ? causal : whole);
    };
    if (!c.use_adaptive_gate) return;
    gate_values = HostTensor::output(DType::f32, {B, H, T});
    confidence = of(DType::f32, {B, H, T}, {B, H});
    pattern_logits = of(DType::f32, {B, T, 4}, {B, 4});
    if (c.pattern_type == AsamPattern::adaptive) patterns = of(DType::i32, {B, H, N}, {B, H});
  }
  AsamInfo views() const {
    return {gate_values.view(), confidence.view(), pattern_logits.view(), patterns.view(), sparse_ratio.view()};
  }
};

std::vector<double> values_of(const HostTensor& tensor) {
  if (!tensor.given()) return {};
  EXPECT_EQ(tensor.damage(), "");
  return tensor.values();
}

TensorView lengths_of(const AsamInput& input) {
  return input.lengths.empty() ? TensorView() : TensorView(input.lengths.data(), DType::i32, {input.batch});
}

HostTensor rows_of(const AsamInput& input) {
  HostTensor x = HostTensor::input(DType::f32, {input.batch, input.length, input.dim});
  for (std::size_t i = 0; i < input.x.size(); ++i) x.set(static_cast<std::int64_t>(i), input.x[i]);
  return x;
}

AsamResult run(const AsamLayer& layer, const AsamInput& input, Executor* executor = nullptr) {
  const HostTensor x = rows_of(input), y = HostTensor::output(DType::f32, {input.batch, input.length, input.dim});
  const InfoTensors info(layer.config(), input);
  Runtime runtime{{}, executor, nullptr};
  const Storage storage(layer.workspace(input.batch, input.length, runtime));
  runtime.workspace = storage.workspace;
  layer.forward(x.view(), y.view(), {lengths_of(input)}, info.views(), runtime);
  EXPECT_TRUE(storage.intact());
  return {values_of(y),
          values_of(info.gate_values),
          values_of(info.confidence),
          values_of(info.pattern_logits),
          values_of(info.patterns),
          values_of(info.sparse_ratio)[0]};
}

// What a layer's results are held to.
struct AsamExpected {
  AsamResult exact;
  ExpectedTensor y, gate_values, confidence, pattern_logits;

  AsamExpected(const AsamConfig& c, const AsamTensors& weights, const AsamInput& input)
      : exact(PlainAsam<double>(c, weights)(input)),
        y{"y", c.dim, DType::f32, exact.y},
        gate_values{"gate_values", 1, DType::f32, exact.gate_values},
        confidence{"confidence", 1, DType::f32, exact.confidence},
        pattern_logits{"pattern_logits", 1, DType::f32, exact.pattern_logits} {
    for (const kit::Order order : kit::kOrders) {
      const AsamResult plain = PlainAsam<float>(c, weights, order)(input);
      // A rare gate or choice may hang by a thread; with these seeds none does.
      EXPECT_EQ(plain.patterns, exact.patterns);
      EXPECT_EQ(plain.sparse_ratio, exact.sparse_ratio);
      y.plain.values.push_back(plain.y);
      gate_values.plain.values.push_back(plain.gate_values);
      confidence.plain.values.push_back(plain.confidence);
      pattern_logits.plain.values.push_back(plain.pattern_logits);
    }
  }

  void expect_right(const AsamResult& found) const {
    y.expect_right(found.y);
    // However few gates there are: each is a sum of many.
    gate_values.expect_right(found.gate_values, kit::kFactor);
    confidence.expect_right(found.confidence, kit::kFactor);
    pattern_logits.expect_right(found.pattern_logits, kit::kFactor);
    EXPECT_NEAR(found.sparse_ratio, exact.sparse_ratio, 1e-6);
  }
};

AsamResult expect_as_defined(const AsamConfig& config, const AsamInput& input, std::uint32_t seed = 5) {
  const AsamTensors tensors = asam_tensors(config, seed);
  const AsamExpected expected(config, tensors, input);
  const AsamResult found = run(AsamLayer(config, views_of(tensors)), input);
  expected.expect_right(found);
  if (config.pattern_type == AsamPattern::adaptive) {
    EXPECT_EQ(found.patterns, expected.exact.patterns);
  }
  return found;
}

constexpr AsamPattern kPatterns[] = {AsamPattern::local,     AsamPattern::strided,      AsamPattern::random,
                                     AsamPattern::clustered, AsamPattern::hierarchical, AsamPattern::adaptive};

TEST(Asam, IsWhatItsDefinitionSays) {
  std::set<double> chosen;
  int dense = 0, sparse = 0;
  std::uint32_t seed = 0;
  for (const AsamPattern pattern : kPatterns) {
    for (const bool causal : {false, true}) {
      for (const int gate : {0, 1, 2}) {  // none, hard, soft
        if (gate == 0 && pattern == AsamPattern::adaptive) continue;
        AsamConfig config = asam_config();
        config.pattern_type = pattern;
        config.causal = causal;
        config.use_adaptive_gate = gate > 0;
        config.gate = gate == 2 ? AsamGate::soft : AsamGate::hard;
        SCOPED_TRACE(std::string(name_of(pattern)) + (causal ? ", causal" : "") +
                     (gate == 0 ? "" : std::string(", ") + name_of(config.gate)));
        const AsamResult result = expect_as_defined(config, asam_input(config, 2, 103), ++seed);
        expect_as_defined(config, asam_input(config, 3, 50, {1, 50, 33}), seed);
        chosen.insert(result.patterns.begin(), result.patterns.end());
        if (gate == 1) {
          for (const double value : result.gate_values) ++(value > 0.5 ? sparse : dense);
        }
        if (gate == 0) {
          EXPECT_LT(result.sparse_ratio, 1);
        }
      }
    }
  }
  EXPECT_EQ(chosen.size(), 4u);  // all that there are
  EXPECT_GT(dense, 0);
  EXPECT_GT(sparse, 0);
}

TEST(Asam, TakesOneRowAndLargeTiles) {
  for (const std::int64_t block : {32, 64, 128}) {
    for (const std::int64_t length : {1, 150}) {
      for (const bool causal : {false, true}) {
        AsamConfig config = asam_config();
        config.block_size = block;
        config.causal = causal;
        expect_as_defined(config, asam_input(config, 1, length));
      }
    }
  }
}

// tests/data/golden_asam.safetensors, which scripts/make_golden_asam.py writes.
class AsamGolden : public testing::Test {
 protected:
  const SafeTensors file = SafeTensors::open(HEDDLE_TEST_DATA "/golden_asam.safetensors");

  std::vector<double> values(const std::string& name) const {
    if (!file.contains(name)) return {};
    const TensorView view = file.tensor(name);
    std::vector<double> out;
    for (std::int64_t i = 0; i < view.elements(); ++i) {
      out.push_back(view.dtype == DType::i32 ? static_cast<const std::int32_t*>(view.data)[i]
                                             : static_cast<double>(static_cast<const float*>(view.data)[i]));
    }
    return out;
  }

  struct Case {
    AsamConfig config;
    AsamInput input;
    std::int64_t layers = 0;
  };
  Case case_of(const std::string& description) const {
    const auto json = nlohmann::json::parse(description);
    const auto number = [&](const char* name) { return json.at(name).get<std::int64_t>(); };
    AsamConfig c;
    c.dim = number("dim");
    c.num_heads = number("num_heads");
    c.dim_head = number("dim_head");
    c.window_size = number("window_size");
    c.stride = number("stride");
    c.num_clusters = number("num_clusters");
    c.gate_hidden_dim = number("gate_hidden_dim");
    c.block_size = number("block_size");
    c.num_random = number("num_random");
    c.seed = number("seed");
    c.scales = json.at("scales").get<std::vector<std::int64_t>>();
    c.pattern_type = asam_pattern_named(json.value("pattern_type", "adaptive"));
    c.gate = asam_gate_named(json.value("gate", "hard"));
    c.causal = json.value("causal", false);
    c.use_adaptive_gate = json.value("use_adaptive_gate", true);
    const TensorView x = file.tensor("x");
    AsamInput input{x.shape[0], json.value("length", x.shape[1]), c.dim, {}, {}};
    for (std::int64_t b = 0; b < input.batch; ++b) {
      const float* from = static_cast<const float*>(x.data) + b * x.stride[0];
      input.x.insert(input.x.end(), from, from + input.length * c.dim);
    }
    if (json.contains("lengths")) input.lengths = json.at("lengths").get<std::vector<std::int32_t>>();
    return {c, input, json.value("layers", std::int64_t{0})};
  }

  // The weights that a layer of this configuration has.
  AsamTensors tensors(const AsamConfig& config) const {
    AsamTensors out = asam_tensors(config);
    for (auto& [name, tensor] : out) {
      const TensorView view = file.tensor("weights/" + name);
      EXPECT_EQ(static_cast<std::size_t>(view.elements()), tensor.values.size()) << name;
      const auto* from = static_cast<const float*>(view.data);
      tensor.values.assign(from, from + view.elements());
    }
    return out;
  }
};

TEST_F(AsamGolden, IsWhatPythonComputes) {
  int cases = 0;
  for (const auto& [name, description] : file.metadata()) {
    if (!file.contains(name + "/sparse_ratio")) continue;  // the encoder's
    SCOPED_TRACE(name);
    ++cases;
    const Case of = case_of(description);
    const AsamTensors weights = tensors(of.config);
    const AsamResult found = run(AsamLayer(of.config, views_of(weights)), of.input);
    const AsamExpected expected(of.config, weights, of.input);
    expected.expect_right(found);
    expected.expect_right({values(name + "/y"),
                           values(name + "/gate_values"),
                           values(name + "/confidence"),
                           values(name + "/pattern_logits"),
                           {},
                           values(name + "/sparse_ratio")[0]});
    EXPECT_EQ(values(name + "/patterns"), found.patterns);
  }
  EXPECT_EQ(cases, 15);
}

TEST_F(AsamGolden, EncoderIsWhatPythonComputes) {
  const Case of = case_of(file.metadata().at("encoder"));
  ASSERT_EQ(of.layers, 2);
  const AsamTensors weights = tensors(of.config);
  AsamState state;
  const AsamState one = views_of(weights);
  for (const auto& [name, view] : one) {
    for (const char* layer : {"layers.0.", "layers.1."}) state[layer + name] = view;
  }
  for (const char* name : {"norm.weight", "norm.bias"}) state[name] = one.at(name);
  const AsamEncoder encoder(of.config, of.layers, state);
  ASSERT_EQ(encoder.layers().size(), 2u);
  EXPECT_GT(encoder.weight_bytes(), encoder.layers()[0].weight_bytes() + encoder.layers()[1].weight_bytes());
  const HostTensor x = rows_of(of.input),
                   y = HostTensor::output(DType::f32, {of.input.batch, of.input.length, of.input.dim});
  const InfoTensors first(of.config, of.input), second(of.config, of.input);
  const Storage storage(encoder.workspace(of.input.batch, of.input.length));
  const AsamInfo infos[] = {first.views(), second.views()};
  encoder.forward(x.view(), y.view(), {}, infos, {storage.workspace, nullptr, nullptr});
  EXPECT_TRUE(storage.intact());
  const auto both_layers = [&](const auto& layer) {
    return layer.normed("norm", layer.of(of.input, layer(of.input).y).y);
  };
  ExpectedTensor expected{"y", of.config.dim, DType::f32, both_layers(PlainAsam<double>(of.config, weights))};
  for (const kit::Order order : kit::kOrders) {
    expected.plain.values.push_back(both_layers(PlainAsam<float>(of.config, weights, order)));
  }
  expected.expect_right(values_of(y));
  expected.expect_right(values("encoder/y"));
  EXPECT_EQ(first.gate_values.values(), run(encoder.layers()[0], of.input).gate_values);
  EXPECT_NE(second.gate_values.values(), first.gate_values.values());
}

TEST(Asam, BitsDoNotDependOnNeighboursThreadsOrPlaces) {
  for (const AsamGate gate : {AsamGate::hard, AsamGate::soft}) {
    for (const bool causal : {false, true}) {
      AsamConfig config = asam_config();
      config.gate = gate;
      config.causal = causal;
      const AsamTensors tensors = asam_tensors(config);
      const AsamLayer layer(config, views_of(tensors));
      const AsamInput input = asam_input(config, 3, 70, {70, 41, 64});
      const auto one = make_thread_pool(1), three = make_thread_pool(3);
      const AsamResult together = run(layer, input, one.get());
      EXPECT_EQ(run(layer, input, three.get()).y, together.y);
      for (std::int64_t b = 0; b < 3; ++b) {
        const std::int64_t rows = 70 * config.dim;
        AsamInput alone = input;
        alone.batch = 1;
        alone.x.assign(input.x.begin() + b * rows, input.x.begin() + (b + 1) * rows);
        alone.lengths = {input.lengths[static_cast<std::size_t>(b)]};
        const AsamResult single = run(layer, alone, three.get());
        EXPECT_TRUE(std::equal(single.y.begin(), single.y.end(), together.y.begin() + b * rows)) << b;
      }
    }
  }
}

TEST(Asam, LaterRowsMoveNoBitOfCausalOnes) {
  AsamConfig config = asam_config();
  config.causal = true;
  const AsamTensors tensors = asam_tensors(config);
  const AsamLayer layer(config, views_of(tensors));
  AsamInput input = asam_input(config, 1, 100);
  const AsamResult whole = run(layer, input);
  for (std::size_t i = static_cast<std::size_t>(37 * config.dim); i < input.x.size(); ++i) input.x[i] *= -3;
  const AsamResult changed = run(layer, input);
  EXPECT_TRUE(std::equal(whole.y.begin(), whole.y.begin() + 37 * config.dim, changed.y.begin()));
  EXPECT_NE(whole.y, changed.y);
}

TEST(Asam, WorksInPlaceOnStridedRows) {
  AsamConfig config = asam_config();
  const AsamTensors tensors = asam_tensors(config);
  const AsamLayer layer(config, views_of(tensors));
  const AsamInput input = asam_input(config, 2, 40);
  const std::vector<double> expected = run(layer, input).y;
  const std::int64_t dim = config.dim;
  std::vector<float> wide(static_cast<std::size_t>(2 * 40 * 2 * dim), 7);  // each row is followed by one that must stay
  for (std::int64_t i = 0; i < 80; ++i) {
    std::copy_n(input.x.begin() + i * dim, dim, wide.begin() + i * 2 * dim);
  }
  const TensorView x(wide.data(), DType::f32, {2, 40, dim}, {80 * dim, 2 * dim, 1});
  WorkspaceBuffer buffer;
  layer.forward(x, x, {}, {}, {buffer.get(layer.workspace(2, 40)), nullptr, nullptr});
  for (std::int64_t i = 0; i < 80; ++i) {
    for (std::int64_t j = 0; j < dim; ++j) {
      ASSERT_EQ(wide[static_cast<std::size_t>(i * 2 * dim + j)], expected[static_cast<std::size_t>(i * dim + j)]);
      ASSERT_EQ(wide[static_cast<std::size_t>(i * 2 * dim + dim + j)], 7);
    }
  }
}

}  // namespace
}  // namespace heddle
