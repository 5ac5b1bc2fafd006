// The part of DLPack's exchange interface (version 1) that reads a tensor without Python calls: a table of functions
// that a framework hangs on its tensor type as `__dlpack_c_exchange_api__`. See github.com/dmlc/dlpack.
#pragma once

#include <cstdint>

namespace heddle::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2 };
constexpr std::uint8_t kFloat8E4m3fn = 10;  // a dtype code, newer than nanobind's list

struct Tensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  struct {
    std::uint32_t major, minor;
  } version;
  ExchangeApi* previous;
  void *allocate, *from_object, *to_object;
  // Fills `out` with what `object` holds, alive as long as that is unchanged. Not 0: a Python error is set. May be
  // null.
  int (*borrow)(void* object, Tensor* out);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsule = "dlpack_exchange_api";

}  // namespace heddle::python::dlpack
