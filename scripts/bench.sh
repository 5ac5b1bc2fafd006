#!/usr/bin/env bash
# Builds and runs the benchmarks. Arguments go to each of them.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release
cmake --build --preset release
for program in build/release/bench/*_bench; do
  "$program" "$@"
done
if compgen -G "bench/*.py" >/dev/null; then
  for script in bench/*.py; do
    PYTHONPATH=build/release/python .venv/bin/python "$script" "$@"
  done
fi
