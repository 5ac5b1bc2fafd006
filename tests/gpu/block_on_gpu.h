// A call of the Transformer block on a GPU, for the tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/transformer_block.h"
#include "kit/device_mirror.h"
#include "kit/host_tensor.h"
#include "unit/block_model.h"

namespace heddle::kit {

inline TransformerBlockOptions on_gpu(DType dtype, std::vector<lowbit::LayerRule> rules = {}) {
  TransformerBlockOptions options = test::block_options();
  options.dtype = dtype;
  options.layers = std::move(rules);
  options.device = Device::cuda;
  return options;
}

// Memory on the GPU between two zones that must keep their bytes.
class Guarded {
 public:
  Guarded(std::size_t bytes, int fill) : memory_(bytes + 2 * kZone, fill), bytes_(bytes), fill_(fill) {}

  Workspace workspace() const { return {static_cast<std::byte*>(memory_.data()) + kZone, bytes_}; }
  bool intact() const {
    std::vector<unsigned char> zones(2 * kZone);
    memory_.read(0, zones.data(), kZone);
    memory_.read(kZone + bytes_, zones.data() + kZone, kZone);
    return std::all_of(zones.begin(), zones.end(), [&](unsigned char byte) { return byte == fill_; });
  }

 private:
  static constexpr std::size_t kZone = 256;
  DeviceMemory memory_;
  std::size_t bytes_;
  int fill_;
};

// A call's tensors on the GPU. What y and the workspace held before must not matter.
class BlockOnGpu {
 public:
  BlockOnGpu(const TransformerBlock& block, const test::BlockInput& input, int fill = 0xFF, std::int64_t longest = 0)
      : block_(block),
        host_y_(HostTensor::output(input.dtype, {input.total(), input.hidden})),
        x(input.tensor()),
        y(host_y_),
        offsets_(input.cu_seqlens.size() * sizeof(std::int32_t)),
        cu_seqlens(offsets_.data(), DType::i32, {input.sequences() + 1}),
        longest(longest > 0 ? longest : input.longest()),
        scratch(block.workspace(input.total(), input.sequences(), this->longest), fill) {
    offsets_.write(0, input.cu_seqlens.data(), offsets_.bytes());
    cu_seqlens.device = Device::cuda;
    runtime.stream = stream.get();
    runtime.workspace = scratch.workspace();
  }

  // Of another input with as many rows and sequences.
  void write(const test::BlockInput& input) {
    x.write(input.tensor());
    offsets_.write(0, input.cu_seqlens.data(), offsets_.bytes());
  }
  void launch() const { block_.forward(x.view(), cu_seqlens, y.view(), runtime, longest); }
  std::vector<double> read() {
    stream.synchronize();
    y.read(host_y_);
    EXPECT_EQ(host_y_.damage(), "");
    EXPECT_TRUE(scratch.intact());
    return host_y_.values();
  }
  std::vector<double> run() {
    launch();
    return read();
  }

 private:
  const TransformerBlock& block_;
  HostTensor host_y_;

 public:
  DeviceTensor x, y;

 private:
  DeviceMemory offsets_;

 public:
  TensorView cu_seqlens;
  std::int64_t longest;
  Guarded scratch;
  DeviceStream stream;
  Runtime runtime;
};

}  // namespace heddle::kit
