// The build, the processor, threads; GPUs, and what their kernels need.
#include <dlfcn.h>

#include <cmath>
#include <exception>
#include <filesystem>

#include "cpu/left_out_targets.h"
#include "doctor.h"
#include "facts.h"
#include "heddle/error.h"
#include "heddle/linear.h"
#include "heddle/runtime.h"
#include "machine.h"
#include "output.h"
#include "tensors.h"

namespace heddle::cli {
namespace {

std::string listed(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

Finding build(const cuda::Gpus& seen) {
  const std::string type = HEDDLE_BUILD_TYPE;
  Finding out{"build", Verdict::ok, std::string("heddle ") + version() + ", " + build_text()};
  out.found += cuda::built() ? "; GPU kernels of CUDA " + cuda_version(seen.runtime) : "; no GPU kernels";
  if (type == "Release" || type == "RelWithDebInfo" || type == "MinSizeRel") return out;
  out.verdict = Verdict::note;
  out.advice = "a build for finding faults is slow: build with CMAKE_BUILD_TYPE=Release.";
  return out;
}

Finding float_layers() {
  const MatrixLibraryFact library = matrix_library_fact();
  if (library.loaded) {
    return {"oneDNN", Verdict::ok, library.state + ", for float layers of the encoder and the Transformer block"};
  }
  return {"oneDNN", Verdict::note, library.state,
          "needed by the encoder and the Transformer block alone, with layers in float32 or bfloat16 on the CPU."};
}

Finding processor(const Machine& here) {
  Finding out{"processor", Verdict::ok, here.model};
  const std::vector<std::string> runnable = cpu_targets(), left_out = cpu::better_targets_left_out();
  const std::string given = setting("HEDDLE_CPU_TARGET");
  std::string used;
  try {
    used = cpu_target();
  } catch (const std::exception& refusal) {
    out.verdict = Verdict::problem;
    out.found += "; " + std::string(refusal.what());
    out.advice = runnable.empty() ? "build for this processor: HEDDLE_X86_TARGETS names targets."
                                  : "take HEDDLE_CPU_TARGET away, or give it one of " + listed(runnable) + ".";
    return out;
  }
  out.found += "; target " + used + ", of those that run here: " + listed(runnable);
  if (used != runnable.front()) {
    out.verdict = Verdict::note;
    out.found += "; HEDDLE_CPU_TARGET is '" + given + "'";
    out.advice = "take HEDDLE_CPU_TARGET away for " + runnable.front() + ", the best of them here.";
  } else if (!left_out.empty()) {
    out.verdict = Verdict::note;
    out.found += "; not compiled: " + listed(left_out);
    out.advice = "this processor has " + left_out.front() + ": build with it in HEDDLE_X86_TARGETS.";
  }
  return out;
}

Finding threads(const Machine& here) {
  Finding out{"threads", Verdict::ok, ""};
  int count = 0;
  try {
    count = num_threads();
  } catch (const std::exception& refusal) {
    out.verdict = Verdict::problem;
    out.found = refusal.what();
    out.advice = "take HEDDLE_NUM_THREADS away for all processors, or give it fewer threads.";
    return out;
  }
  out.found = std::to_string(count) + ", on " + std::to_string(here.processors) + " processors";
  int usable = here.processors;
  if (here.processor_time > 0) {
    usable = std::min(usable, std::max(1, static_cast<int>(std::ceil(here.processor_time))));
    out.found += ", of which a control group gives the time of " + fixed(here.processor_time, 2);
  }
  if (const std::string given = setting("HEDDLE_NUM_THREADS"); !given.empty()) {
    out.found += "; HEDDLE_NUM_THREADS is '" + given + "'";
  }
  if (count > usable) {
    out.verdict = Verdict::note;
    out.advice = "more threads than processors wait for each other: HEDDLE_NUM_THREADS=" + std::to_string(usable) + ".";
  } else if (count == 1 && usable > 1) {
    out.verdict = Verdict::note;
    out.advice =
        "kernels on the CPU could use more: take HEDDLE_NUM_THREADS away, or see which processors this "
        "process may run on.";
  }
  return out;
}

// Signs of an NVIDIA GPU, whatever this build has.
struct Signs {
  bool device = false;  // a driver of the kernel has one
  bool driver = false;  // the part of the driver that programs load is there
};
Signs signs() {
  std::error_code ignored;
  Signs found;
  found.device = std::filesystem::exists("/dev/nvidiactl", ignored);
  if (void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)) {
    found.driver = true;
    dlclose(library);
  }
  return found;
}

Finding no_gpu(const cuda::Gpus& seen) {
  const Signs here = signs();
  Finding out{"GPUs", Verdict::ok, "none found; calls run on the CPU"};
  if (!here.device && !here.driver) return out;
  // A driver's library alone may have come with an image or a toolkit.
  out.verdict = here.device ? Verdict::problem : Verdict::note;
  out.found = here.device ? "there is an NVIDIA GPU (/dev/nvidiactl)" : "there may be an NVIDIA GPU (libcuda.so.1)";
  out.found += ", and no kernel runs on it: " + seen.absence;
  if (!cuda::built()) {
    out.advice = "build with HEDDLE_CUDA=ON, where nvcc 12.8 or later is on the PATH.";
  } else if (!here.driver) {
    out.advice =
        "install NVIDIA's driver with libcuda.so.1; a container is started with its GPUs (docker run --gpus "
        "all).";
  } else if (seen.driver > 0 && seen.driver < seen.runtime) {
    out.found += " (the driver serves CUDA " + cuda_version(seen.driver) + ", this build is of " +
                 cuda_version(seen.runtime) + ")";
    out.advice = "install a driver for CUDA " + cuda_version(seen.runtime) +
                 " or later, or build with an older nvcc, "
                 "12.8 at the least.";
  } else {
    out.advice = "see what nvidia-smi says, and whether CUDA_VISIBLE_DEVICES hides it.";
  }
  return out;
}

Finding one_gpu(const cuda::Gpus& seen, std::size_t i) {
  const cuda::Gpu& gpu = seen.list[i];
  Finding out{"GPU " + std::to_string(i), Verdict::ok, gpu_text(gpu)};
  if (!is_served(gpu)) {
    out.verdict = i == seen.current ? Verdict::problem : Verdict::note;
    out.found += "; kernels are for compute capability 8.0 (Ampere) and later";
    out.advice = "run on the CPU, or on another GPU: CUDA_VISIBLE_DEVICES chooses.";
  } else if (gpu.major > 9 && seen.driver < seen.runtime) {
    out.verdict = Verdict::problem;
    out.found += "; newer than Hopper, it runs PTX of CUDA " + cuda_version(seen.runtime) +
                 ", which a driver for CUDA " + cuda_version(seen.driver) + " does not compile";
    out.advice = "install a driver for CUDA " + cuda_version(seen.runtime) + " or later.";
  } else if (gpu.major > 9) {
    out.verdict = Verdict::note;
    out.found += "; newer than Hopper, it runs Ampere's kernels from PTX, which the first call compiles";
    out.advice = "expect less than the chip can do, and measure: heddle bench --device cuda.";
  }
  return out;
}

// Its candidate is asked, which loads the library.
Finding cublaslt() {
  const char* const name = "cuBLASLt";
  StandIns views(Device::cuda);
  const TensorView x = views.tensor(DType::bf16, {1, 64});
  try {
    for (const Candidate& c : explain_linear(x, dense_weights(views.tensor(DType::bf16, {64, 64})))) {
      if (c.name != "cublaslt" || c.supported) continue;
      return {name, Verdict::note, c.reason,
              "install cuBLAS of CUDA 12 or 13, or import torch first: linear layers of many rows, dense ones and all "
              "gradients need it."};
    }
  } catch (const std::exception& refusal) {  // of a setting, which another line is about
    return {name, Verdict::note, std::string("not asked: ") + refusal.what(), "see the variables below."};
  }
  return {name, Verdict::ok, "found"};
}

Finding tuning_file(const cuda::Gpu* gpu) {
  const TuningFact file = tuning();
  Finding out{"tuning", Verdict::ok, file.state};
  constexpr const char* kMeasure = "heddle tune --out FILE measures this GPU's; HEDDLE_TUNING=FILE uses them.";
  if (file.refused) {
    out.verdict = Verdict::problem;
    out.advice = "take HEDDLE_TUNING away, or let heddle tune --out FILE write the file.";
  } else if (file.state.empty()) {
    out.found = "no file (HEDDLE_TUNING): costs of an H200 are taken";
    if (gpu == nullptr || gpu->major == 9) return out;
    out.verdict = Verdict::note;
    out.advice = kMeasure;
  } else if (!file.used) {
    out.verdict = Verdict::note;
    out.advice = gpu != nullptr ? kMeasure : "take HEDDLE_TUNING away: it is of no use without a GPU.";
  }
  return out;
}

}  // namespace

Findings examine_machine(const cuda::Gpus& seen) {
  const Machine here = machine();
  return {build(seen), float_layers(), processor(here), threads(here)};
}

Findings examine_gpus(const cuda::Gpus& seen) {
  Findings out;
  if (seen.list.empty()) out.push_back(no_gpu(seen));
  for (std::size_t i = 0; i < seen.list.size(); ++i) out.push_back(one_gpu(seen, i));
  const cuda::Gpu* const gpu = served_gpu(seen);
  if (gpu != nullptr) out.push_back(cublaslt());
  if (gpu != nullptr || !setting("HEDDLE_TUNING").empty()) out.push_back(tuning_file(gpu));
  return out;
}

}  // namespace heddle::cli
