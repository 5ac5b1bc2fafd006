#!/usr/bin/env bash
# Prints the folder of an nvcc that can build the GPU kernels (12.8 or later): the one that CUDACXX names, that on the PATH,
# CUDA's usual place, or what `setup.sh --dev` put into .venv. Fails where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc "$PWD/.venv/cuda/bin/nvcc"; do
  [[ -n $nvcc && -x $nvcc ]] || continue
  version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p') || continue
  if [[ -n $version && $(printf '%s\n' 12.8 "$version" | sort -V | head -1) == 12.8 ]]; then
    dirname "$nvcc"
    exit 0
  fi
done
exit 1
