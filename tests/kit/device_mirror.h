// The GPU's side of the kit: host tensors mirrored into its memory, byte for byte, so that poison and guard zones are
// there too. A build without CUDA has tests/kit/stubs/device_mirror.cc instead.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "heddle/attention.h"
#include "heddle/runtime.h"
#include "kit/host_tensor.h"

namespace heddle::kit {

struct Gpu {
  std::string name;     // empty if none can be used
  std::string absence;  // why not, then
  int major = 0, minor = 0;
  std::size_t memory = 0;  // bytes
};
// The current device.
Gpu current_gpu();

// GPU memory of exactly `bytes` bytes, so that a memory checker sees any access past it. Throws RuntimeError.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes);
  DeviceMemory(std::size_t bytes, int fill);

  void* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }
  // Waits for the copy; `offset` in bytes from the beginning.
  void write(std::size_t offset, const void* from, std::size_t bytes);
  void read(std::size_t offset, void* to, std::size_t bytes) const;

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
};

// A copy of all of a host tensor's memory, viewed with the same shape, strides and offset.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  // A tensor that is not given has a mirror that is not given.
  explicit DeviceTensor(const HostTensor& host);

  const TensorView& view() const { return view_; }
  // Between the mirror and the memory of a host tensor of the same layout.
  void write(const HostTensor& host);
  void read(HostTensor& host) const;

 private:
  DeviceMemory memory_;
  TensorView view_;
};

class DeviceStream {
 public:
  DeviceStream();
  void* get() const { return stream_.get(); }
  // Throws RuntimeError with what any work on the stream did wrong.
  void synchronize() const;

 private:
  struct Destroy {
    void operator()(void* stream) const;
  };
  std::unique_ptr<void, Destroy> stream_;
};

// Work captured from a stream, to be run any number of times.
class DeviceGraph {
 public:
  // Captures what `launch` puts on the stream; nothing runs yet.
  DeviceGraph(const DeviceStream& stream, const std::function<void()>& launch);
  void replay(const DeviceStream& stream) const;
  // How many things it does: launches, copies, fills.
  std::size_t nodes() const { return nodes_; }

 private:
  struct Destroy {
    void operator()(void* graph) const;
  };
  std::unique_ptr<void, Destroy> executable_;
  std::size_t nodes_ = 0;
};

}  // namespace heddle::kit
