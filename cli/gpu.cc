#include "gpu.h"

#include <algorithm>
#include <chrono>
#include <list>
#include <optional>
#include <string>

#include "heddle/error.h"
#include "kit/device_mirror.h"
#include "tensors.h"

namespace heddle::cli {

struct Gpu::Parts {
  kit::DeviceStream stream;
  kit::DeviceMemory workspace;
  std::list<kit::DeviceMemory> tensors;
};

Gpu::Gpu(const char* verb) {
  const kit::Gpu found = kit::current_gpu();
  if (found.name.empty()) throw RuntimeError(std::string("[") + verb + "] " + found.absence);
  parts_ = std::make_unique<Parts>();
}
Gpu::~Gpu() = default;

TensorView Gpu::allocate(const TensorView& like) {
  TensorView view = like;
  const auto bytes = static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
  view.data = parts_->tensors.emplace_back(bytes).data();
  view.stride = contiguous_strides(view.rank, view.shape);
  view.device = Device::cuda;
  return view;
}

TensorView Gpu::copy(const TensorView& host) {
  const HostTensor contiguous = converted(host, host.dtype);
  const TensorView view = allocate(host);
  parts_->tensors.back().write(0, contiguous.data(), contiguous.bytes());
  return view;
}

void Gpu::read(const TensorView& from, void* to) const {
  parts_->stream.synchronize();
  for (const kit::DeviceMemory& memory : parts_->tensors) {
    if (memory.data() == from.data) memory.read(0, to, memory.bytes());
  }
}

Runtime Gpu::runtime(std::size_t workspace) {
  parts_->workspace = kit::DeviceMemory(workspace);
  Runtime runtime;
  runtime.stream = parts_->stream.get();
  if (workspace > 0) runtime.workspace = {parts_->workspace.data(), workspace};
  return runtime;
}

double Gpu::seconds(const std::function<void()>& launch) const {
  parts_->stream.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  launch();
  parts_->stream.synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct GpuTimer::Parts {
  const Gpu& gpu;
  const kit::DeviceStream& stream;
  int repeats = 1;
  std::optional<kit::DeviceGraph> graph = {};

  void capture(const std::function<void()>& launch) {
    graph.emplace(stream, [&] {
      for (int n = 0; n < repeats; ++n) launch();
    });
    graph->replay(stream);
  }
};

GpuTimer::GpuTimer(const Gpu& gpu, const std::function<void()>& launch)
    : parts_(std::make_unique<Parts>(Parts{gpu, gpu.parts_->stream})) {
  constexpr double kRound = 2e-3;
  gpu.seconds(launch);
  parts_->capture(launch);
  const double once = round();
  if (once > kRound) return;
  parts_->repeats = std::clamp(static_cast<int>(kRound / once), 2, 200);
  parts_->capture(launch);
}
GpuTimer::~GpuTimer() = default;

double GpuTimer::round() const {
  return parts_->gpu.seconds([&] { parts_->graph->replay(parts_->stream); }) / parts_->repeats;
}

}  // namespace heddle::cli
