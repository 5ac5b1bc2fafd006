#!/usr/bin/env bash
# A user's project builds against Heddle: installed static, installed shared (both moved after the install), by
# pkg-config, and by FetchContent, which is add_subdirectory; with GPU kernels that far that the first is compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
# Folders as deep as the release build's, and kernels as its step of test.sh has them: the compiler's cache then has their objects.
build=$root/build/consumer
rm -rf "$build" "$build"-*
options=(-G Ninja -DCMAKE_BUILD_TYPE=Release)
if command -v ccache >/dev/null; then options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi

# $1: name, rest: a program. Prints what it prints, and fails as it does, which it would not within an echo.
say() {
  local printed
  printed=$("${@:2}")
  echo "$1: $printed"
}

# $1: name, rest: arguments of cmake. Configures, builds and runs the user's project.
consume() {
  local name=$1
  shift
  cmake -S tests/consumer -B "$build-$name" "${options[@]}" "$@" >"$build/$name.log"
  cmake --build "$build-$name" >>"$build/$name.log" || { cat "$build/$name.log"; exit 1; }
  say "$name" "$build-$name/consumer"
}

mkdir -p "$build"
for kind in static shared; do
  shared=$([[ $kind == shared ]] && echo ON || echo OFF)
  cmake -S . -B "$build-heddle-$kind" "${options[@]}" -DBUILD_SHARED_LIBS=$shared \
    -DHEDDLE_BUILD_TESTS=OFF -DHEDDLE_BUILD_CLI=OFF -DHEDDLE_BUILD_BENCH=OFF -DHEDDLE_BUILD_EXAMPLES=OFF -DHEDDLE_EMU128=OFF \
    -DHEDDLE_CUDA_ONE_CODE=ON >"$build/$kind.log"
  cmake --build "$build-heddle-$kind" >>"$build/$kind.log" || { cat "$build/$kind.log"; exit 1; }
  cmake --install "$build-heddle-$kind" --prefix "$build/first-$kind" >/dev/null
  mv "$build/first-$kind" "$build/prefix-$kind"
  if grep -rIl -e "$root" "$build/prefix-$kind"; then
    echo "these installed files name the source folder" >&2
    exit 1
  fi
  for file in "$build/prefix-$kind"/lib*/libheddle.so; do  # where there is one
    if [[ -e $file ]] && readelf -d "$file" | grep -E 'NEEDED.*lib(dnnl|OpenCL|gomp)'; then
      echo "$file needs what only libheddle_onednn.so may" >&2
      exit 1
    fi
  done
  consume "find_package-$kind" -DCMAKE_PREFIX_PATH="$build/prefix-$kind"

  pc=$(dirname "$(find "$build/prefix-$kind" -name heddle.pc)")
  flags=$(PKG_CONFIG_PATH=$pc pkg-config --cflags --libs heddle)
  if [[ $flags == *cudart_static* ]]; then flags+=" -L$(scripts/nvcc.sh)/../lib64 -L/usr/local/cuda/lib64"; fi
  # shellcheck disable=SC2086  # the flags are words
  "${CXX:-g++}" tests/consumer/main.cc -o "$build/pkg-config-$kind" $flags
  say "pkg-config-$kind" env LD_LIBRARY_PATH="$(dirname "$pc")" "$build/pkg-config-$kind"
done
# The pages' programs, with the flags that pkg-config last gave.
for page in README.md docs/kv_cache.md; do
  example=$build/$(basename "$page" .md)
  sed -n '/^```cpp$/,/^```$/{/^```/d;p}' "$page" >"$example.cc"
  says=$(sed -nE 's/.*\b(it|this) prints `([^`]*)`.*/\2/p' "$page")
  # shellcheck disable=SC2086
  "${CXX:-g++}" "$example.cc" -o "$example" $flags
  printed=$(LD_LIBRARY_PATH=$(dirname "$pc") "$example")
  [[ -n $says && $printed == "$says" ]] || { echo "the program of $page printed '$printed', and the page says '$says'" >&2; exit 1; }
  echo "the program of $page: printed $printed"
done
consume FetchContent -DHEDDLE_SOURCE="$root" -DHEDDLE_CUDA=OFF

# There a kernel's compiler is started by Heddle's launcher alone: no ccache is the user's choice.
kernel=_deps/heddle-build/src/CMakeFiles/heddle.dir/cuda/any/attention_bwd_rows/launch.cu.o
cmake -S tests/consumer -B "$build-cuda" -G Ninja -DHEDDLE_SOURCE="$root" -DHEDDLE_CUDA=ON >"$build/cuda.log"
cmake --build "$build-cuda" --target "$kernel" >>"$build/cuda.log" || { cat "$build/cuda.log"; exit 1; }
echo "FetchContent with GPU kernels: compiles"
