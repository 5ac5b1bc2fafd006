#!/usr/bin/env bash
# Builds Heddle and runs the demo: report/index.html and lowbit.html. Arguments go to it: `--budget` is the time in seconds for
# measuring. The build is not counted; the pages say how long it took. `--sparse`, first, is the pages on native and on adaptive
# sparse attention, report/sparse.html and asam.html, alone, with that time for each.
set -euo pipefail
cd "$(dirname "$0")/.."

demos=(scripts.demo)
if [[ ${1-} == --sparse ]]; then
  demos=(scripts.demo.sparse scripts.demo.asam)
  shift
fi
scripts/setup.sh
begun=$(date +%s)
# The GPU's kernels are for a part of the low-bit page, where there is a GPU.
kernels=OFF
if nvidia-smi -L >/dev/null 2>&1; then kernels=AUTO; fi
cmake --preset release -DHEDDLE_CUDA=$kernels
cmake --build --preset demo
built=$(($(date +%s) - begun))
for demo in "${demos[@]}"; do
  PYTHONPATH=build/release/python .venv/bin/python -m "$demo" --build-seconds "$built" "$@"
done
