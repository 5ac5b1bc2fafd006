#!/usr/bin/env bash
# Benchmarks on a GPU against what torch brings, and against FlashAttention-3 and bitsandbytes where Python finds them (PYTHONPATH). Runs in the tree, after a build with the Python module, and in the folder that
# scripts/stage.sh makes. SHARD=i/n: the i-th of n parts, i from 0; bench/merge.py joins their files. Arguments go to bench/attention_bench_gpu.py:
# --but FILE... goes on with what those have not, --old FILE... measures what those have of older sources; then parts are of about equal time.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
for place in python build/release/python; do
  if compgen -G "$place/heddle/_heddle*.so" >/dev/null; then
    PYTHONPATH=$place${PYTHONPATH:+:$PYTHONPATH} exec "$python" bench/attention_bench_gpu.py --shard "${SHARD:-0/1}" "$@"
  fi
done
echo "bench_gpu.sh: there is no Python module: build the release preset, or run in build/stage" >&2
exit 1
