// Linear layers by the module over oneDNN, which is opened here.
#include "model/linear.h"

#include <dlfcn.h>

#include <exception>
#include <filesystem>
#include <new>

#include "core/check.h"
#include "core/os/os.h"
#include "cpu/row_ops.h"
#include "heddle/runtime.h"
#include "model/onednn/module.h"

namespace heddle {
namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... why) {
  throw RuntimeError(text("[linear] float32 and bfloat16 layers on the CPU need oneDNN, which cannot be loaded: ",
                          why..., "; attention, layers in 8 and 4 bits and GPUs do without"));
}

// Beside the file that holds this code; or else, as where that is a program with the library linked in, wherever the
// system's loader looks.
const OneDnnModule* open_module() {
  const std::filesystem::path here = os::file_of(reinterpret_cast<const void*>(&open_module));
  std::error_code ignored;
  const std::filesystem::path beside = here.parent_path() / kOneDnnModuleFile;
  const bool is_beside = !here.empty() && std::filesystem::exists(beside, ignored);
  void* const module = dlopen(is_beside ? beside.c_str() : kOneDnnModuleFile, RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) {
    const std::string why = dlerror();
    if (why.starts_with(kOneDnnModuleFile)) {  // itself, and not what it needs
      refuse(why, ". It is a part of heddle, and must be beside ", here.string(),
             " or where the loader looks (LD_LIBRARY_PATH)");
    }
    refuse(why, ". Install what is missing: on Debian 12, oneDNN is the package libdnnl2");
  }
  const auto* found = static_cast<const OneDnnModule*>(dlsym(module, kOneDnnModuleSymbol));
  if (found == nullptr || std::string_view(found->heddle_version) != version()) {
    refuse(is_beside ? beside.string() : kOneDnnModuleFile, " is of heddle ",
           found == nullptr ? "?" : found->heddle_version, ", and the library that opens it of ", version(),
           ": both must be of one build");
  }
  return found;
}

// Opened once, by one thread; tried again after a failure, and never closed: the process may end while others use it.
const OneDnnModule& module() {
  static const OneDnnModule* const opened = open_module();
  return *opened;
}

// oneDNN's own exceptions are unknown outside of the module, but std::exception, which they are, is known.
template <class Body>
auto translate(const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    throw RuntimeError(text("[linear] oneDNN failed: ", error.what()));
  }
}

}  // namespace

struct FloatLinear::Impl {
  std::unique_ptr<OneDnnLayer> layer;
};

FloatLinear::FloatLinear(const float* weight, const float* bias, std::int64_t out, std::int64_t in, DType dtype,
                         DType y_dtype) {
  const OneDnnModule& onednn = module();
  impl_ = translate([&] {
    return std::make_unique<Impl>(
        onednn.make({.widen = widen, .narrow = narrow}, {out, in, dtype, y_dtype}, weight, bias));
  });
}
FloatLinear::FloatLinear(FloatLinear&&) noexcept = default;
FloatLinear& FloatLinear::operator=(FloatLinear&&) noexcept = default;
FloatLinear::~FloatLinear() = default;

std::size_t FloatLinear::weight_bytes() const { return impl_->layer->weight_bytes(); }
std::size_t FloatLinear::scratch_bytes() const { return impl_->layer->scratch_bytes(); }

void FloatLinear::run(const void* x, void* y, std::int64_t rows, void* scratch) const {
  translate([&] { impl_->layer->run(x, y, rows, static_cast<std::byte*>(scratch)); });
}

std::string matrix_library() {
  int major = 0, minor = 0, patch = 0;
  module().onednn_version(&major, &minor, &patch);
  return text("oneDNN ", major, ".", minor, ".", patch);
}

}  // namespace heddle
