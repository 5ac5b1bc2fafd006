// A checkpoint quantised as it was planned, file by file and tensor by tensor.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "checkpoint/folder.h"
#include "checkpoint/quantize_plan.h"
#include "checkpoint/write.h"
#include "core/check.h"
#include "core/dtypes.h"
#include "cpu/lowbit.h"
#include "cpu/row_ops.h"
#include "lowbit/scale_rules.h"
#include "ops/lowbit/arguments.h"

namespace heddle::lowbit {
namespace {

using nlohmann::json;

const Check kCheck("quantize_checkpoint");

// Memory of one tensor, kept for the next one.
struct Bytes {
  std::vector<std::byte> held;
  std::byte* get(std::size_t bytes) {
    if (held.size() < bytes) held.resize(bytes);
    return held.data();
  }
};

// Pages of a mapped file need not stay in memory once they were read.
void forget(const SafeTensors::Entry& entry) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(entry.data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(entry.data) + entry.bytes) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

class Work {
 public:
  Work(const std::string& input, const QuantizeCheckpointOptions& options, const Runtime& runtime)
      : options_(options),
        executor_(runtime.executor != nullptr ? *runtime.executor : default_executor()),
        plan_(input, options),
        model_(plan_.model),
        report_(plan_.report) {}

  QuantizeReport write(const std::string& output) {
    NewFolder folder(output);
    share_global_scales();
    std::map<std::string, std::string> file_of;
    std::size_t total = 0;
    for (std::size_t file = 0; file < model_.files.size(); ++file) {
      write_safetensors(file, folder.file(model_.names[file]), &file_of, &total);
      report_.files.push_back(model_.names[file]);
    }
    announce(nullptr);
    report_.bytes_after = total;
    std::sort(report_.layers.begin(), report_.layers.end(),
              [](const LayerReport& a, const LayerReport& b) { return a.name < b.name; });
    const auto put = [&](const std::string& name, const json& content) {
      write_file(folder.file(name), content.dump(2) + "\n");
      report_.files.push_back(name);
    };
    if (!model_.index_name.empty()) {
      json index = model_.index;
      index["metadata"]["total_size"] = total;
      index["weight_map"] = file_of;
      put(model_.index_name, index);
    }
    json config = model_.config;
    config["quantization_config"] = json::parse(report_.quantization_config);
    put("config.json", config);
    for (const std::string& name : model_.folders) folder.make_folder(name);
    for (const std::string& name : model_.others) {
      copy_file((model_.folder / name).string(), folder.file(name));
      report_.files.push_back(name);
    }
    folder.finish();
    return std::move(report_);
  }

 private:
  // The global scale of each nvfp4 layer, of those whose products run as one the same.
  void share_global_scales() {
    std::map<std::string, float> scale_of;
    for (const bool write : {false, true}) {
      for (PlannedTensor& p : plan_.tensors) {
        if (p.choice.kind != LayerChoice::Kind::quantized || !p.choice.format.global_scale) continue;
        float& scale = scale_of[fused_name(p.layer)];
        if (write) {
          p.global_scale = scale;
          continue;
        }
        const TensorView weights = view(p);
        const auto largest = std::bit_cast<float>(cpu::largest_weight(checked_weights(kCheck, weights, "weights"),
                                                                      weights.shape[0], weights.shape[1], executor_));
        if (!std::isfinite(largest)) refuse_values(p, weights);
        scale = std::max(scale, power_of_two_global_scale(p.choice.rule, largest));
        forget(*p.entry);
      }
    }
  }

  [[noreturn]] void refuse_values(const PlannedTensor& p, const TensorView& weights) const {
    std::int64_t i = 0;
    while (std::isfinite(load_element(weights.data, p.dtype, i))) ++i;
    throw Error(text("[quantize_checkpoint] ", plan_.where(p), " holds ", load_element(weights.data, p.dtype, i),
                     " at [", i / weights.shape[1], ", ", i % weights.shape[1], "]: weights must be finite"));
  }

  // The tensor's data, copied where the file does not align it.
  TensorView view(const PlannedTensor& p) {
    const void* data = p.entry->data;
    if (reinterpret_cast<std::uintptr_t>(data) % size_of(p.dtype) != 0) {
      data = std::memcpy(aligned_.get(p.entry->bytes), data, p.entry->bytes);
    }
    return TensorView(data, p.dtype, {p.entry->shape[0], p.entry->shape[1]});
  }

  void announce(const PlannedTensor* next) {
    if (!options_.progress) return;
    QuantizeProgress progress;
    if (next != nullptr) {
      progress.tensor = next->name;
      if (!next->layer.empty()) {
        progress.format =
            next->choice.kind == LayerChoice::Kind::quantized ? name_of(next->choice.format) : std::string("bfloat16");
      }
    }
    progress.bytes_done = bytes_done_;
    progress.bytes_total = report_.bytes_before;
    progress.layers_done = report_.layers.size();
    progress.layers_total = plan_.layers;
    options_.progress(progress);
  }

  void write_safetensors(std::size_t file, const std::string& path, std::map<std::string, std::string>* file_of,
                         std::size_t* total) {
    std::vector<SafeTensorsWriter::Tensor> tensors;
    for (const PlannedTensor& p : plan_.tensors) {
      if (p.file != file) continue;
      if (p.choice.kind == LayerChoice::Kind::quantized) {
        for (auto& tensor : tensors_of_layer(p.layer, p.choice.format, p.entry->shape[0], p.entry->shape[1], p.dtype)) {
          tensors.push_back(std::move(tensor));
        }
      } else {
        tensors.push_back({p.name, p.layer.empty() ? p.entry->dtype : "BF16", p.entry->shape, p.bytes_after});
      }
    }
    for (const auto& tensor : tensors) {
      file_of->emplace(tensor.name, model_.names[file]);
      *total += tensor.bytes;
    }
    SafeTensorsWriter writer(path, std::move(tensors), model_.files[file].metadata());
    for (const PlannedTensor& p : plan_.tensors) {
      if (p.file != file) continue;
      announce(&p);
      if (p.layer.empty()) {
        writer.write(p.name, p.entry->data, p.entry->bytes);
      } else if (p.choice.kind == LayerChoice::Kind::quantized) {
        quantise(p, writer);
      } else {
        round(p, writer);
      }
      forget(*p.entry);
      bytes_done_ += p.entry->bytes;
    }
    writer.finish();
  }

  LayerReport report_of(const PlannedTensor& p, std::string format, std::string rule) const {
    LayerReport r;
    r.name = p.layer;
    r.file = model_.names[p.file];
    r.format = std::move(format);
    r.rule = std::move(rule);
    r.rows = p.entry->shape[0];
    r.columns = p.entry->shape[1];
    r.bytes_before = p.entry->bytes;
    r.bytes_after = p.bytes_after;
    r.global_scale = p.global_scale;
    return r;
  }

  void quantise(const PlannedTensor& p, SafeTensorsWriter& writer) {
    QuantizedMatrix matrix = storage(p.choice.format, p.entry->shape[0], p.entry->shape[1]);
    TensorView* parts[] = {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale};
    for (std::size_t i = 0; i < std::size(parts); ++i) {
      TensorView& part = *parts[i];
      if (part.given()) part.data = storage_[i].get(static_cast<std::size_t>(part.elements()) * size_of(part.dtype));
    }
    const TensorView weights = view(p);
    LayerReport report = report_of(p, name_of(p.choice.format), name_of(p.choice.rule));
    plan_.said_of(p, [&] {
      QuantizeOptions options{.rule = p.choice.rule, .importance = {}, .global_scale = p.global_scale};
      if (!p.importance.empty()) options.importance = TensorView(p.importance.data(), DType::f32, {p.entry->shape[1]});
      Runtime runtime;
      runtime.executor = &executor_;
      quantize(weights, options, matrix, runtime);
      const std::size_t bytes = quantization_error_workspace(matrix.rows);
      runtime.workspace = scratch_.get(bytes);
      report.error = quantization_error(weights, matrix, {}, {}, runtime);
    });
    write_layer(p.layer, matrix, p.dtype, writer);
    report_.layers.push_back(std::move(report));
  }

  // float32 to bfloat16.
  void round(const PlannedTensor& p, SafeTensorsWriter& writer) {
    const TensorView weights = view(p);
    const std::int64_t count = weights.elements(), columns = p.entry->shape[1];
    const auto* from = static_cast<const float*>(weights.data);
    auto* to = reinterpret_cast<std::uint16_t*>(storage_[0].get(p.bytes_after));
    narrow(from, count, to);
    LayerReport report = report_of(p, "bfloat16", "");
    double signal = 0, noise = 0, sum = 0, most = -1;
    for (std::int64_t i = 0; i < count; ++i) {
      const double error = std::abs(static_cast<double>(bf16_to_f32(to[i])) - from[i]);
      kCheck.require(std::isfinite(error), plan_.where(p), " holds ", from[i], " at [", i / columns, ", ", i % columns,
                     "]: bfloat16 does not hold it");
      signal += static_cast<double>(from[i]) * from[i];
      noise += error * error;
      sum += error;
      if (error > most) {
        most = error;
        report.error.max_row = i / columns;
        report.error.max_column = i % columns;
      }
    }
    report.error.sqnr = noise > 0 ? 10 * std::log10(signal / noise) : std::numeric_limits<double>::infinity();
    report.error.mean = count > 0 ? sum / static_cast<double>(count) : 0;
    report.error.max = std::max(most, 0.0);
    writer.write(p.name, to, p.bytes_after);
    report_.layers.push_back(std::move(report));
  }

  const QuantizeCheckpointOptions& options_;
  Executor& executor_;
  QuantizePlan plan_;
  const ModelFolder& model_;
  QuantizeReport& report_;
  Bytes aligned_, storage_[4];
  WorkspaceBuffer scratch_;
  std::size_t bytes_done_ = 0;
};

}  // namespace

QuantizeReport quantize_checkpoint(const std::string& input, const std::string& output,
                                   const QuantizeCheckpointOptions& options, const Runtime& runtime) {
  return Work(input, options, runtime).write(output);
}

}  // namespace heddle::lowbit
