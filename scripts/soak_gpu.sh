#!/usr/bin/env bash
# Repeats the calls of every GPU kernel, several tiles to a block of threads, alone, beside another stream and beside
# another process, and looks for rows that change or are wrong. Before that it plants faults in some kernels and sees
# that they are found. Runs in the tree, after a build, and in the folder that scripts/stage.sh makes.
# SECONDS_TO_SOAK: of the search (default 600; a minute in `make test-gpu`). JOBS: processes side by side (default 4).
# SHARD=i/n: the i-th of n parts of the cases, in one process, and with i > 0 without planting.
# HEDDLE_ALLOW_NO_CUBLASLT=1: where cuBLASLt cannot be loaded, its cases are left out, and the soak says so; else it fails.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${SECONDS_TO_SOAK:-600}
folder=
for place in tests build/release/tests/soak; do
  if [[ -x $place/heddle_soak ]]; then folder=$place && break; fi
done
if [[ -z $folder ]]; then
  echo "soak_gpu.sh: there is no heddle_soak: build the release preset with HEDDLE_CUDA=ON, or run in build/stage" >&2
  exit 1
fi
. scripts/find_cublaslt.sh
options=(--seconds "$seconds")
if [[ -n ${HEDDLE_ALLOW_NO_CUBLASLT:-} ]]; then options+=(--without-cublaslt); fi
logs=${LOGS:-build/logs}
mkdir -p "$logs"
part=${SHARD:-0/1}

# Hopper's kernels alone have places for faults.
if [[ ${part%/*} == 0 ]]; then "$folder/heddle_soak_planted" --prove --seconds 10; fi

if [[ -n ${SHARD:-} ]]; then
  "$folder/heddle_soak" "${options[@]}" --shard "$SHARD" >"$logs/soak.${SHARD%/*}.log" 2>&1 || failed=1
else
  jobs=${JOBS:-4} pids=()
  for ((i = 0; i < jobs; ++i)); do
    "$folder/heddle_soak" "${options[@]}" --shard "$i/$jobs" >"$logs/soak.$i.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
fi
for log in "$logs"/soak.*.log; do grep -v '^ok' "$log" || true; done
[[ -z ${failed:-} ]] || { echo "soak_gpu.sh: it failed; see $logs/soak.*.log" >&2; exit 1; }
