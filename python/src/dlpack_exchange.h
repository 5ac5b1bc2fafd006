// The part of DLPack's exchange interface (version 1) that reads and allocates tensors without Python calls: a table of
// functions that a framework hangs on its tensor type as `__dlpack_c_exchange_api__`. See github.com/dmlc/dlpack.
#pragma once

#include <cstdint>

namespace heddle::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaManaged = 13 };
constexpr std::uint8_t kUnsigned = 1, kFloat8E4m3fn = 10;  // dtype codes, the last newer than nanobind's list

struct Tensor {
  void* data = nullptr;
  std::int32_t device_type = 0, device_id = 0;
  std::int32_t ndim = 0;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype = {};
  std::int64_t *shape = nullptr, *strides = nullptr;
  std::uint64_t byte_offset = 0;
};

struct Version {
  std::uint32_t major, minor;
};

// A tensor that its holder gives back by calling deleter(itself).
struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  // A contiguous tensor of `prototype`'s device, dtype and shape. Not 0: set_error was called.
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  void *from_object, *to_object;
  // Fills `out` with what `object` holds, alive as long as that is unchanged. Not 0: a Python error is set. May be
  // null.
  int (*borrow)(void* object, Tensor* out);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsule = "dlpack_exchange_api";

}  // namespace heddle::python::dlpack
