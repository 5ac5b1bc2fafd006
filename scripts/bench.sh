#!/usr/bin/env bash
# Builds Heddle and runs the benchmark against torch and OpenBLAS. Arguments go to bench/attention_bench.py.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release
cmake --build --preset demo
PYTHONPATH=build/release/python exec .venv/bin/python bench/attention_bench.py "$@"
