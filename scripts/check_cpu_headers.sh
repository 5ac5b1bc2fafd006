#!/usr/bin/env bash
# Compiles each src/cpu/*-inl.h alone, as the target that has every unit: each includes what it uses. Highway, which all of
# them need, is read once.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
options="-std=c++20 -Wall -Wextra -Wno-unused-function -Isrc -Iinclude"
# The target's source up to the table of its kernels.
sed '/cpu\/target-inl.h/d; /^#endif/d; /^#if/d' src/cpu/targets/avx512_bf16.cc >"$folder/target.h"
${CXX:-c++} $options -x c++-header "$folder/target.h" -o "$folder/target.h.gch"

git ls-files --cached --others --exclude-standard 'src/cpu/*-inl.h' | sort -u |
  CXX=${CXX:-c++} options=$options folder=$folder xargs -P "$(nproc)" -I{} sh -c '
    echo "#include \"${1#src/}\"" >"$folder/$(basename "$1").cc"
    $CXX $options -Winvalid-pch -include "$folder/target.h" -fsyntax-only "$folder/$(basename "$1").cc" ||
      { echo "$1 does not include all that it uses" >&2; exit 1; }' sh {}
