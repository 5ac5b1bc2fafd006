#!/usr/bin/env bash
# Heddle under other host compilers than the one that make test takes: builds the library and its C++ tests without CUDA, runs these, and compiles one kernel of each
# folder of src/cuda. By hand, as it takes a quarter of an hour for each. Arguments: compilers, such as g++-13 clang++-19 (default: every one of those that is installed);
# clang wants the OpenMP runtime of its version, such as libomp-19-dev.
set -euo pipefail
cd "$(dirname "$0")/.."

compilers=("$@")
if ((${#compilers[@]} == 0)); then
  for name in g++-1{3,4} clang++-{16,17,18,19}; do
    if command -v "$name" >/dev/null; then compilers+=("$name"); fi
  done
fi
((${#compilers[@]})) || { echo "test_compilers.sh: there is none of g++-13, g++-14, clang++-16 to clang++-19; name one" >&2; exit 1; }
PATH=$(scripts/nvcc.sh):$PATH
export PATH

for compiler in "${compilers[@]}"; do
  path=$(command -v "$compiler") || { echo "test_compilers.sh: there is no $compiler" >&2; exit 1; }
  build=build/compiler-$compiler
  # With the compiler, or the build type, of before, a folder would keep what it knows of it.
  rm -rf "$build" "$build-cuda"
  options=(-G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_COMPILER=$path" -DHEDDLE_X86_TARGETS=avx2 -DHEDDLE_EMU128=OFF -DHEDDLE_BUILD_BENCH=OFF)
  cmake -S . -B "$build" "${options[@]}" -DHEDDLE_CUDA=OFF >"$build.log"
  cmake --build "$build" >>"$build.log" || { tail -n 50 "$build.log"; exit 1; }
  ctest --test-dir "$build" -j "$(nproc)" --output-on-failure >"$build.ctest.log" || { tail -n 50 "$build.ctest.log"; exit 1; }
  grep 'tests passed' "$build.ctest.log"
  cmake -S . -B "$build-cuda" "${options[@]}" -DHEDDLE_CUDA=ON "-DCMAKE_CUDA_HOST_COMPILER=$path" >"$build-cuda.log"
  # One kernel a folder, and all that the host decides about them.
  ninja -C "$build-cuda" -t targets all | sed -n 's/^\(src\/CMakeFiles\/heddle.dir\/cuda\/.*\.o\): .*/\1/p' >"$build-cuda/objects"
  mapfile -t kernels < <(grep '\.cu\.o$' "$build-cuda/objects" | awk '{folder = $0; sub("/[^/]*$", "", folder); if (!seen[folder]++) print}')
  mapfile -t hosts < <(grep '\.cc\.o$' "$build-cuda/objects")
  cmake --build "$build-cuda" --target "${kernels[@]}" "${hosts[@]}" >>"$build-cuda.log" || { grep -v '^ptxas' "$build-cuda.log" | tail -n 50; exit 1; }
  echo "$compiler: tests passed, ${#kernels[@]} kernels and ${#hosts[@]} host sources of src/cuda compile"
done
