// The kit of a build without CUDA: there is no GPU, and nothing can be mirrored.
#include "kit/device_mirror.h"

#include "heddle/error.h"

namespace heddle::kit {
namespace {

constexpr const char* kAbsence = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON";
[[noreturn]] void refuse() { throw RuntimeError(kAbsence); }

}  // namespace

Gpu current_gpu() { return {.name = "", .absence = kAbsence}; }

void DeviceMemory::Free::operator()(void*) const {}
DeviceMemory::DeviceMemory(std::size_t) { refuse(); }
DeviceMemory::DeviceMemory(std::size_t, int) { refuse(); }
void DeviceMemory::write(std::size_t, const void*, std::size_t) { refuse(); }
void DeviceMemory::read(std::size_t, void*, std::size_t) const { refuse(); }
DeviceTensor::DeviceTensor(const HostTensor&) { refuse(); }
void DeviceTensor::write(const HostTensor&) { refuse(); }
void DeviceTensor::read(HostTensor&) const { refuse(); }
void DeviceStream::Destroy::operator()(void*) const {}
DeviceStream::DeviceStream() { refuse(); }
void DeviceStream::synchronize() const { refuse(); }
void DeviceGraph::Destroy::operator()(void*) const {}
DeviceGraph::DeviceGraph(const DeviceStream&, const std::function<void()>&) { refuse(); }
void DeviceGraph::replay(const DeviceStream&) const { refuse(); }

}  // namespace heddle::kit
