#!/usr/bin/env bash
# Builds Heddle and runs the demo: report/index.html and lowbit.html. Arguments go to it: `--budget` is the time in seconds for
# measuring. The build is not counted; the pages say how long it took. `--sparse`, first, is the page on native sparse attention,
# report/sparse.html, alone.
set -euo pipefail
cd "$(dirname "$0")/.."

demo=scripts.demo
if [[ ${1-} == --sparse ]]; then
  demo=scripts.demo.sparse
  shift
fi
scripts/setup.sh
begun=$(date +%s)
# The GPU's kernels are for a part of the low-bit page, where there is a GPU.
kernels=OFF
if nvidia-smi -L >/dev/null 2>&1; then kernels=AUTO; fi
cmake --preset release -DHEDDLE_CUDA=$kernels
cmake --build --preset demo
PYTHONPATH=build/release/python exec .venv/bin/python -m "$demo" --build-seconds "$(($(date +%s) - begun))" "$@"
