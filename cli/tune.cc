// heddle tune: measures on the current GPU what the candidates' estimates are made of.
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <thread>

#include "core/files.h"
#include "cuda/backend.h"
#include "cuda/common/tuning.h"
#include "gpu.h"
#include "heddle/error.h"
#include "kit/device_mirror.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

// A line of the table, the candidate that it describes, and the call that shows its rate.
struct Line {
  const char* name;
  const char* candidate;
  DType dtype, cache;
  Precision precision;
  std::int64_t B, H, Hkv, Sq, Sk, D;
  Pass pass = Pass::forward;
};

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kF8 = DType::f8e4m3;
constexpr Precision kExact = Precision::f32;
constexpr Line kLines[] = {
    {"sm90 d64", "sm90", kBf16, kBf16, kExact, 4, 32, 32, 4096, 4096, 64},
    {"sm90 d128", "sm90", kBf16, kBf16, kExact, 4, 16, 16, 4096, 4096, 128},
    {"sm90 d256", "sm90", kBf16, kBf16, kExact, 4, 8, 8, 4096, 4096, 256},
    {"sm80 d64", "sm80", kBf16, kBf16, kExact, 4, 32, 32, 4096, 4096, 64},
    {"sm80 d128", "sm80", kBf16, kBf16, kExact, 4, 16, 16, 4096, 4096, 128},
    {"sm80 d256", "sm80", kBf16, kBf16, kExact, 4, 8, 8, 4096, 4096, 256},
    {"sm80 f32", "sm80", kF32, kF32, kExact, 2, 16, 16, 4096, 4096, 128},
    {"sm80 tf32", "sm80", kF32, kF32, Precision::tf32, 2, 16, 16, 4096, 4096, 128},
    {"sm80_int8 d64", "sm80_int8", kBf16, kBf16, Precision::int8_qk, 4, 32, 32, 4096, 4096, 64},
    {"sm80_int8 d128", "sm80_int8", kBf16, kBf16, Precision::int8_qk, 4, 16, 16, 4096, 4096, 128},
    {"sm90_fp8 d64", "sm90_fp8", kF8, kF8, kExact, 4, 32, 32, 4096, 4096, 64},
    {"sm90_fp8 d128", "sm90_fp8", kF8, kF8, kExact, 4, 16, 16, 4096, 4096, 128},
    {"sm90_decode", "sm90_decode", kBf16, kBf16, kExact, 64, 32, 8, 1, 8192, 128},
    {"sm90_decode rows", "sm90_decode", kBf16, kBf16, kExact, 64, 64, 8, 16, 8192, 128},
    {"sm80_decode", "sm80_decode", kBf16, kBf16, kExact, 64, 32, 8, 1, 8192, 128},
    {"sm90_bwd d64", "sm90", kBf16, kBf16, kExact, 4, 32, 32, 4096, 4096, 64, Pass::backward},
    {"sm90_bwd d128", "sm90", kBf16, kBf16, kExact, 4, 16, 16, 4096, 4096, 128, Pass::backward},
    {"sm90_bwd d256", "sm90", kBf16, kBf16, kExact, 4, 8, 8, 4096, 4096, 256, Pass::backward},
    {"sm80_bwd d64", "sm80", kBf16, kBf16, kExact, 4, 32, 32, 4096, 4096, 64, Pass::backward},
    {"sm80_bwd d128", "sm80", kBf16, kBf16, kExact, 4, 16, 16, 4096, 4096, 128, Pass::backward},
    {"sm80_bwd d256", "sm80", kBf16, kBf16, kExact, 4, 8, 8, 4096, 4096, 256, Pass::backward},
    {"sm80_bwd f32", "sm80", kF32, kF32, kExact, 2, 16, 16, 2048, 2048, 128, Pass::backward},
    {"sm80_bwd tf32", "sm80", kF32, kF32, Precision::tf32, 2, 16, 16, 2048, 2048, 128, Pass::backward},
    {"naive_cuda", "naive_cuda", kBf16, kBf16, kExact, 1, 16, 16, 1024, 1024, 128},
    {"baseline_cuda", "baseline_cuda", kBf16, kBf16, kExact, 1, 16, 16, 4096, 4096, 128},
};

// Random numbers: how fast products run depends on the power that they draw, and so on their operands.
kit::DeviceMemory random_memory(std::size_t bytes, DType dtype) {
  constexpr std::int64_t kBlock = 1 << 20;
  const HostTensor block(dtype == DType::f8e4m3 ? kBf16 : dtype, {kBlock});
  fill_normal(block.view(), 1);
  if (dtype == DType::f8e4m3) {  // any bytes but NaN's
    for (std::size_t n = 0; n < block.bytes(); ++n) block.data()[n] &= std::byte{0xBF};
  }
  kit::DeviceMemory memory(bytes);
  for (std::size_t at = 0; at < bytes; at += block.bytes()) {
    memory.write(at, block.data(), std::min(block.bytes(), bytes - at));
  }
  return memory;
}

class Call {
 public:
  // Seconds of one call, and its estimate so far.
  double seconds = 0, estimate = 0;
  std::string refusal;  // not empty: the candidate does not run here

  Call(const Line& line, std::int64_t B, std::int64_t H, std::int64_t Hkv, std::int64_t Sq, std::int64_t Sk) {
    options_.force = line.candidate;
    options_.precision = line.precision;
    q_ = tensor({B, Sq, H, line.D}, line.dtype);
    k_ = tensor({B, Sk, Hkv, line.D}, line.cache);
    v_ = tensor({B, Sk, Hkv, line.D}, line.cache);
    o_ = tensor({B, Sq, H, line.D}, line.dtype == kF8 ? kBf16 : line.dtype);
    if (line.pass == Pass::backward) {
      lse_ = tensor({B, H, Sq}, kF32);
      d_o_ = tensor({B, Sq, H, line.D}, line.dtype);
      gradients_.dq = tensor({B, Sq, H, line.D}, line.dtype);
      gradients_.dk = tensor({B, Sk, Hkv, line.D}, line.dtype);
      gradients_.dv = tensor({B, Sk, Hkv, line.D}, line.dtype);
    }
    for (const Candidate& candidate : explain_attention(q_, k_, v_, options_, line.pass)) {
      if (candidate.name != line.candidate) continue;
      refusal = candidate.reason;
      estimate = candidate.seconds;
    }
    if (refusal.empty()) seconds = line.pass == Pass::forward ? measure_forward() : measure_backward();
  }

 private:
  TensorView tensor(std::initializer_list<std::int64_t> shape, DType dtype) {
    TensorView view(nullptr, dtype, shape);
    memory_.push_back(random_memory(static_cast<std::size_t>(view.elements()) * size_of(dtype), dtype));
    view.data = memory_.back().data();
    view.device = Device::cuda;
    return view;
  }

  double measure_forward() {
    const Runtime runtime = gpu_.runtime(attention_forward_workspace(q_, k_, v_, options_));
    return median([&] { attention_forward(q_, k_, v_, o_, {}, options_, runtime); });
  }

  // Of o and lse that a forward wrote, as the free choice has it.
  double measure_backward() {
    AttentionOptions free = options_;
    free.force.clear();
    const Runtime before = gpu_.runtime(attention_forward_workspace(q_, k_, v_, free));
    gpu_.seconds([&] { attention_forward(q_, k_, v_, o_, lse_, free, before); });
    const Runtime runtime = gpu_.runtime(attention_backward_workspace(q_, k_, v_, gradients_, options_));
    return median([&] { attention_backward(q_, k_, v_, o_, lse_, d_o_, {}, gradients_, options_, runtime); });
  }

  // Of rounds of several milliseconds, after pauses in which the chip cools.
  double median(const std::function<void()>& launch) const {
    const GpuTimer timer(gpu_, launch);
    std::vector<double> times;
    for (int round = 0; round < 7; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      times.push_back(timer.round());
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  Gpu gpu_{"tune"};
  std::vector<kit::DeviceMemory> memory_;
  TensorView q_, k_, v_, o_, lse_, d_o_;
  AttentionGradients gradients_;
  AttentionOptions options_;
};

// What a line of the table says: a line through two points. Decoding few keys shows what splitting and merging them
// costs.
struct Measured {
  double fixed = 0, rate = 0;  // seconds; products or, of decode, bytes a second
  double seconds = 0, estimate = 0;
  bool decode = false;
  std::string refusal;

  explicit Measured(const Line& line) : decode(line.Sq == 1) {
    const Call large(line, line.B, line.H, line.Hkv, line.Sq, line.Sk);
    refusal = large.refusal;
    if (!refusal.empty()) return;
    const std::int64_t few = 4096, group = line.H / line.Hkv;
    const Call small = decode ? Call(line, 1, line.H, line.Hkv, 1, few) : Call(line, 1, group, 1, 16, 16);
    const double share = decode ? static_cast<double>(few) / static_cast<double>(line.B * line.Sk) : 0.0;
    const double work = (large.seconds - small.seconds) / (1 - share);
    fixed = small.seconds - share * work;
    const auto rows = static_cast<double>(line.B * line.H * line.Sq), keys = static_cast<double>(line.Sk);
    const double products = line.pass == Pass::forward ? 2 : 5;
    const double flops = 2 * products * rows * keys * static_cast<double>(line.D);
    const double bytes = 2 * static_cast<double>(line.B * line.Hkv) * keys * static_cast<double>(line.D) *
                         static_cast<double>(size_of(line.cache));
    rate = (decode ? bytes : flops) / work;
    seconds = large.seconds;
    estimate = large.estimate;
  }
};

struct Tune {
  CommonFlags common;
  std::string out;

  void run() const {
    const cuda::Gpus seen = cuda::gpus();
    if (seen.list.empty()) throw RuntimeError("[tune] " + seen.absence);
    const cuda::Gpu& gpu = seen.list.at(seen.current);
    Json kernels = Json::object(), rows = Json::array();
    Table table({{"kernel"},
                 {"fixed", Align::right},
                 {"TFLOP/s", Align::right},
                 {"TB/s", Align::right},
                 {"estimated", Align::right},
                 {"measured", Align::right}});
    for (const Line& line : kLines) {
      const Measured found(line);
      if (!found.refusal.empty()) {
        rows.push_back({{"kernel", line.name}, {"refusal", found.refusal}});
        if (!common.json) std::cerr << line.name << ": " << found.refusal << '\n';
        continue;
      }
      const char* const rate = found.decode ? "bytes" : "flops";
      kernels[line.name] = {{"fixed", found.fixed}, {rate, found.rate}};
      rows.push_back({{"kernel", line.name},
                      {"fixed_seconds", found.fixed},
                      {rate, found.rate},
                      {"estimated_seconds", found.estimate},
                      {"seconds", found.seconds}});
      table.add({line.name, seconds_text(found.fixed), found.decode ? "-" : fixed(found.rate / 1e12, 1),
                 found.decode ? fixed(found.rate / 1e12, 2) : "-", seconds_text(found.estimate),
                 seconds_text(found.seconds)});
    }
    if (!out.empty()) {
      const std::string text = cuda::tuning_text(
          {gpu.name, std::to_string(gpu.major) + "." + std::to_string(gpu.minor), gpu.multiprocessors, version()},
          kernels);
      OutputFile file("tune", out, OutputFile::Existing::replace);
      file.write(text.data(), text.size());
      file.finish();
    }
    if (common.json) {
      Json said = {{"gpu", gpu.name}, {"version", version()}, {"rows", rows}};
      if (!out.empty()) said["out"] = out;
      std::cout << said.dump(2) << '\n';
      return;
    }
    std::cout << gpu.name << "\n\n";
    table.print();
    if (!out.empty()) std::cout << "\nwritten to " << out << "; to use it: HEDDLE_TUNING=" << out << '\n';
  }
};

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("tune", "Measure, on the current GPU, what the choice among candidates rests on");
  verb->footer("Example: heddle tune --out h200.json && HEDDLE_TUNING=h200.json heddle info");
  const auto self = std::make_shared<Tune>();
  self->common.add_to(*verb, /*runs_kernels=*/false);
  verb->add_option("--out", self->out, "A file for HEDDLE_TUNING to name");
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
