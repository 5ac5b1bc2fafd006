#!/usr/bin/env bash
# Builds Heddle and runs the benchmarks against torch and OpenBLAS: attention, then linear layers. --target T holds everybody to
# fewer instructions than the processor has; other arguments go to bench/attention_bench.py, which then runs alone.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release
cmake --build --preset demo
export PYTHONPATH=build/release/python
.venv/bin/python bench/attention_bench.py "$@"
if (($# == 0)) || [[ $# == 2 && $1 == --target ]]; then .venv/bin/python bench/linear_bench.py "$@"; fi
