// Linear layers by oneDNN. Weights are repacked once into the layout its kernel asks for; every call is one matmul
// primitive of a fixed row count, so that nothing is compiled at run time and a row's bits do not depend on the others.
#include "model/onednn/module.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>

#include "model/linear.h"
#include "model/places.h"

namespace heddle {
namespace {

using dnnl::memory;

constexpr std::array<std::int64_t, 2> kRowCounts = {kLinearRows, kLinearRowStep};
// Columns of bf16 weights that are widened together: the f32 panel stays in the second-level cache up to 2,000 inputs.
constexpr std::int64_t kPanel = 128;

// oneDNN sizes its loops by the calling thread's OpenMP setting, which belongs to the host: it is put back.
class OneOmpThread {
 public:
  OneOmpThread() : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  ~OneOmpThread() {
    if (before_ != 1) omp_set_num_threads(before_);
  }
  OneOmpThread(const OneOmpThread&) = delete;
  OneOmpThread& operator=(const OneOmpThread&) = delete;

 private:
  int before_;
};

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

memory::data_type onednn_type(DType dtype) {
  return dtype == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

// oneDNN multiplies bf16 faster than f32 only with the instructions for it.
bool native_bf16() {
  constexpr auto kNeeded = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kNeeded) == kNeeded;
}

// `columns` output columns, with a primitive for each row count.
struct Panel {
  std::int64_t first = 0, columns = 0;
  memory::desc weight_desc;
  struct Step {
    memory::desc x, y, scratch;
    dnnl::matmul primitive;
  };
  std::array<Step, kRowCounts.size()> steps;
  memory bias;
  std::vector<float> bias_data;
  memory weight;                           // unless
  std::vector<std::uint16_t> bf16_weight;  // is to be widened
};

class Layer final : public OneDnnLayer {
 public:
  Layer(const OneDnnHost& host, const OneDnnLayerShape& shape, const float* weight, const float* bias)
      : host_(host), shape_(shape), widened_(shape.dtype == DType::bf16 && !native_bf16()) {
    const std::int64_t out = shape.out, width = widened_ ? kPanel : out;
    for (std::int64_t first = 0; first < out; first += width) {
      add_panel(weight, bias, first, std::min(width, out - first));
    }
    if (widened_) {
      x_bytes_ = aligned(sizeof(float) * kLinearRows * shape.in);
      y_bytes_ = aligned(sizeof(float) * kLinearRows * std::min(kPanel, out));
    }
  }

  std::size_t weight_bytes() const override { return weight_bytes_; }
  std::size_t scratch_bytes() const override { return library_bytes_ + x_bytes_ + weight_panel_bytes_ + y_bytes_; }
  void run(const void* x, void* y, std::int64_t rows, std::byte* scratch) const override {
    const OneOmpThread one_thread;
    multiply(x, y, rows, scratch);
  }

 private:
  void add_panel(const float* weight, const float* bias, std::int64_t first, std::int64_t columns) {
    const std::int64_t in = shape_.in;
    Panel panel;
    panel.first = first;
    panel.columns = columns;
    const auto type = widened_ ? memory::data_type::f32 : onednn_type(shape_.dtype);
    const auto y_type = widened_ ? memory::data_type::f32 : onednn_type(shape_.y_dtype);
    const memory::desc bias_desc({1, columns}, memory::data_type::f32, memory::format_tag::ab);
    memory::desc weight_desc({in, columns}, type, memory::format_tag::any);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    for (std::size_t i = 0; i < kRowCounts.size(); ++i) {
      const memory::desc x({kRowCounts[i], in}, type, memory::format_tag::ab);
      const memory::desc y({kRowCounts[i], columns}, y_type, memory::format_tag::ab);
      const dnnl::matmul::primitive_desc choice({x, weight_desc, bias_desc, y}, attributes, engine());
      weight_desc = choice.weights_desc();  // the first choice binds the others
      panel.steps[i] = {x, y, choice.scratchpad_desc(), dnnl::matmul(choice)};
      library_bytes_ = std::max(library_bytes_, aligned(choice.scratchpad_desc().get_size()));
    }
    panel.weight_desc = weight_desc;
    panel.bias_data.assign(bias + first, bias + first + columns);
    panel.bias = memory(bias_desc, engine(), panel.bias_data.data());
    weight_bytes_ += sizeof(float) * columns + pack(weight + first * in, panel);
    panels_.push_back(std::move(panel));
  }

  // Repacks [columns, in] into the panel; returns its bytes.
  std::size_t pack(const float* weight, Panel& panel) {
    const std::size_t packed_bytes = panel.weight_desc.get_size();
    const memory::desc given({shape_.in, panel.columns}, memory::data_type::f32, memory::format_tag::ba);
    memory source(given, engine(), const_cast<float*>(weight));
    dnnl::stream stream(engine());
    if (!widened_) {
      panel.weight = memory(panel.weight_desc, engine());
      dnnl::reorder(source, panel.weight).execute(stream, source, panel.weight);
      stream.wait();
      return packed_bytes;
    }
    // bf16 in the order of the packed f32 layout, so that widening is one straight pass.
    memory target(panel.weight_desc, engine());
    dnnl::reorder(source, target).execute(stream, source, target);
    stream.wait();
    const auto count = static_cast<std::int64_t>(packed_bytes / sizeof(float));
    panel.bf16_weight.resize(packed_bytes / sizeof(float));
    host_.narrow(static_cast<const float*>(target.get_data_handle()), count, panel.bf16_weight.data());
    weight_panel_bytes_ = std::max(weight_panel_bytes_, aligned(packed_bytes));
    return sizeof(std::uint16_t) * panel.bf16_weight.size();
  }

  static void multiply(const Panel& panel, const memory& weight, const void* x, void* y, std::size_t x_row_bytes,
                       std::size_t y_row_bytes, std::int64_t rows, void* scratch) {
    dnnl::stream stream(engine());
    for (std::int64_t row = 0; row < rows;) {
      const Panel::Step& step = panel.steps[rows - row == kLinearRows ? 0 : 1];
      auto* from = const_cast<std::byte*>(static_cast<const std::byte*>(x) + row * x_row_bytes);
      auto* to = static_cast<std::byte*>(y) + row * y_row_bytes;
      step.primitive.execute(stream, {{DNNL_ARG_SRC, memory(step.x, engine(), from)},
                                      {DNNL_ARG_WEIGHTS, weight},
                                      {DNNL_ARG_BIAS, panel.bias},
                                      {DNNL_ARG_DST, memory(step.y, engine(), to)},
                                      {DNNL_ARG_SCRATCHPAD, memory(step.scratch, engine(), scratch)}});
      row += step.x.dims()[0];
    }
    stream.wait();
  }

  void multiply(const void* x, void* y, std::int64_t rows, std::byte* scratch) const {
    const auto [out, in, dtype, y_dtype] = shape_;
    if (!widened_) {
      multiply(panels_[0], panels_[0].weight, x, y, in * size_of(dtype), out * size_of(y_dtype), rows, scratch);
      return;
    }
    auto* wide_x = reinterpret_cast<float*>(scratch + library_bytes_);
    auto* wide_weight = reinterpret_cast<float*>(scratch + library_bytes_ + x_bytes_);
    auto* wide_y = reinterpret_cast<float*>(scratch + library_bytes_ + x_bytes_ + weight_panel_bytes_);
    host_.widen(static_cast<const std::uint16_t*>(x), rows * in, wide_x);
    for (const Panel& panel : panels_) {
      host_.widen(panel.bf16_weight.data(), static_cast<std::int64_t>(panel.bf16_weight.size()), wide_weight);
      const memory weight(panel.weight_desc, engine(), wide_weight);
      multiply(panel, weight, wide_x, wide_y, in * sizeof(float), panel.columns * sizeof(float), rows, scratch);
      for (std::int64_t row = 0; row < rows; ++row) {
        const float* from = wide_y + row * panel.columns;
        const std::int64_t to = row * out + panel.first;
        if (y_dtype == DType::bf16) {
          host_.narrow(from, panel.columns, static_cast<std::uint16_t*>(y) + to);
        } else {
          std::memcpy(static_cast<float*>(y) + to, from, sizeof(float) * panel.columns);
        }
      }
    }
  }

  OneDnnHost host_;
  OneDnnLayerShape shape_;
  bool widened_;  // weights are held in bf16 and multiplied in f32
  std::vector<Panel> panels_;
  std::size_t weight_bytes_ = 0;
  // Parts of a call's scratch, each a multiple of 64 bytes; all but the first only when widened.
  std::size_t library_bytes_ = 0, x_bytes_ = 0, weight_panel_bytes_ = 0, y_bytes_ = 0;
};

std::unique_ptr<OneDnnLayer> make(const OneDnnHost& host, const OneDnnLayerShape& shape, const float* weight,
                                  const float* bias) {
  const OneOmpThread one_thread;
  return std::make_unique<Layer>(host, shape, weight, bias);
}

void onednn_version(int* major, int* minor, int* patch) {
  const dnnl_version_t* const found = dnnl_version();
  *major = found->major;
  *minor = found->minor;
  *patch = found->patch;
}

}  // namespace
}  // namespace heddle

extern "C" [[gnu::visibility("default")]] const heddle::OneDnnModule heddle_onednn;
const heddle::OneDnnModule heddle_onednn = {HEDDLE_VERSION, heddle::onednn_version, heddle::make};
