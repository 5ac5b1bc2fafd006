// heddle bench linear: how fast layers over packed weights run here.
#include <iostream>
#include <list>
#include <memory>
#include <optional>

#include "bench.h"
#include "choices.h"
#include "heddle/error.h"
#include "heddle/linear.h"
#include "machine.h"
#include "output.h"
#include "problem.h"

namespace heddle::cli {
namespace {

struct LinearRow {
  std::int64_t rows;
  std::string candidate;
  std::size_t workspace;
  Timing timing;
};

// W [N, K] of normal values in a format, packed for a device; on it, where that is a GPU.
struct Layer {
  std::list<HostTensor> owned;
  PackedWeights weights;

  TensorView allocate(const TensorView& like) {
    return owned.emplace_back(like.dtype, std::vector(like.shape.begin(), like.shape.begin() + like.rank)).view();
  }
  Layer(const lowbit::Format& format, std::int64_t outputs, std::int64_t inputs, WeightOrder order, Gpu* gpu) {
    const HostTensor plain(DType::f32, {outputs, inputs});
    fill_normal(plain.view(), 1);
    lowbit::QuantizedMatrix matrix = lowbit::storage(format, outputs, inputs);
    for (TensorView* part : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
      if (part->given()) *part = allocate(*part);
    }
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(lowbit::quantize_workspace(plain.view(), {}, matrix));
    lowbit::quantize(plain.view(), {}, matrix, runtime);
    weights = packed_storage(format, outputs, inputs, /*gated=*/false, order);
    weights.data = allocate(weights.data);
    pack_weights(matrix, weights);
    if (gpu == nullptr) return;
    weights.data = gpu->copy(weights.data);
    weights.device = Device::cuda;
  }
};

struct BenchLinear {
  CommonFlags common;
  std::vector<std::int64_t> rows = {1, 16, 256};
  std::int64_t outputs = 4096, inputs = 4096;
  std::string format = "nvfp4", dtype, device = "cpu", force;
  bool int8_x = false, fp8_x = false;
  double seconds = 0.5;

  DType type() const { return dtype_named(!dtype.empty() ? dtype : device == "cuda" ? "bf16" : "f32"); }

  void run() const {
    common.apply();
    require_device("bench", device);
    for (const std::int64_t count : rows) require_at_least_one(count, "--rows");
    require_at_least_one(outputs, "--outputs");
    require_at_least_one(inputs, "--inputs");
    const lowbit::Format packed = lowbit::format_named(format);
    const PackedOrder order = packed_order_for(
        packed, outputs, inputs, {device == "cuda" ? Device::cuda : Device::cpu, /*gated=*/false, int8_x, fp8_x});
    if (!order.refusal.empty()) throw Error("[bench] " + order.refusal);
    std::optional<Gpu> gpu;
    if (device == "cuda") gpu.emplace("bench");
    const Layer layer(packed, outputs, inputs, order.order, gpu ? &*gpu : nullptr);
    std::vector<LinearRow> found;
    for (const std::int64_t count : rows) found.push_back(run_one(count, layer.weights, gpu ? &*gpu : nullptr));
    common.json ? print_json(found, layer.weights) : print_text(found, layer.weights);
  }

  LinearRow run_one(std::int64_t count, const PackedWeights& weights, Gpu* gpu) const {
    const HostTensor host_x(type(), {count, inputs}), host_y(type(), {count, outputs});
    fill_normal(host_x.view(), 2);
    const TensorView x = gpu != nullptr ? gpu->copy(host_x.view()) : host_x.view(),
                     y = gpu != nullptr ? gpu->allocate(host_y.view()) : host_y.view();
    LinearOptions options;
    options.int8_x = int8_x;
    options.force = force;
    LinearRow row{count, "", 0, {}};
    for (const Candidate& c : explain_linear(x, weights, options)) {
      if (c.chosen) row.candidate = c.name;
    }
    row.workspace = linear_forward_workspace(x, weights, options);
    WorkspaceBuffer buffer;
    Runtime runtime;
    if (gpu != nullptr) {
      runtime = gpu->runtime(row.workspace);
    } else {
      runtime.workspace = buffer.get(row.workspace);
    }
    row.timing = measure_call([&] { linear_forward(x, weights, y, options, runtime); }, seconds, gpu);
    return row;
  }

  double rate(const LinearRow& row) const {
    return 2.0 * static_cast<double>(row.rows) * static_cast<double>(outputs) * static_cast<double>(inputs) /
           row.timing.median;
  }

  void print_json(const std::vector<LinearRow>& found, const PackedWeights& weights) const {
    Json out = {{"processor", machine().model}};
    add_place(out, device);
    out["version"] = version();
    out["rows"] = Json::array();
    for (const LinearRow& row : found) {
      Json problem = {{"rows", row.rows}, {"outputs", outputs}, {"inputs", inputs}, {"format", format}};
      problem["order"] = name_of(weights.order);
      problem["dtype"] = name_of(type());
      if (int8_x) problem["int8_x"] = true;
      if (fp8_x) problem["fp8_x"] = true;
      if (device != "cpu") problem["device"] = device;
      out["rows"].push_back({{"problem", problem},
                             {"candidate", row.candidate},
                             {"workspace_bytes", row.workspace},
                             {"weights_bytes", weights.data.elements()},
                             {"seconds", row.timing.median},
                             {"seconds_p10", row.timing.low},
                             {"seconds_p90", row.timing.high},
                             {"runs", row.timing.runs},
                             {"flops", rate(row)}});
    }
    std::cout << out.dump(2) << '\n';
  }

  void print_text(const std::vector<LinearRow>& found, const PackedWeights& weights) const {
    const auto bytes = static_cast<double>(weights.data.elements());
    std::cout << "W [" << outputs << ", " << inputs << "] " << format << " in order " << name_of(weights.order) << ", "
              << bytes_text(bytes) << "; x and y " << name_of(type()) << ", " << place_text(device) << "\n\n";
    Table table({{"rows of x", Align::right},
                 {"candidate"},
                 {"median", Align::right},
                 {"p10", Align::right},
                 {"p90", Align::right},
                 {"runs", Align::right},
                 {"GFLOP/s", Align::right},
                 {"GB/s of weights", Align::right}});
    for (const LinearRow& row : found) {
      table.add({std::to_string(row.rows), row.candidate, seconds_text(row.timing.median), seconds_text(row.timing.low),
                 seconds_text(row.timing.high), std::to_string(row.timing.runs), fixed(rate(row) / 1e9, 1),
                 fixed(bytes / row.timing.median / 1e9, 2)});
    }
    table.print();
  }
};

}  // namespace

void add_bench_linear(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand("linear", "Linear layers over packed weights");
  examples(*verb, {"heddle bench linear --rows 1 --outputs 1024 --inputs 1024 --format mxfp4",
                   "heddle bench linear --rows 1 16 256 --format int8_row --int8-x --json",
                   "heddle bench linear --rows 1 16 --outputs 14336 --format nvfp4 --device cuda"});
  const auto self = std::make_shared<BenchLinear>();
  self->common.add_to(*verb);
  add_device_flag(*verb, self->device);
  verb->add_option("--rows", self->rows, "Rows of x, M; several are timed one after another")->capture_default_str();
  verb->add_option("--outputs", self->outputs, "Rows of W, N")->capture_default_str();
  verb->add_option("--inputs", self->inputs, "Columns of W, K")->capture_default_str();
  add_format_flag(*verb, self->format, "The weights' format");
  add_dtype_flag(*verb, self->dtype, "Of x and y (default: f32, on a GPU bf16)");
  verb->add_flag("--int8-x", self->int8_x, "x is rounded to 8 bits");
  verb->add_flag("--fp8-x", self->fp8_x, "On a GPU, weights are packed for x in e4m3");
  add_force_flag(*verb, self->force);
  add_seconds_flag(*verb, self->seconds);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
