#!/usr/bin/env bash
# The tests that need a GPU, C++ and Python, a minute of the soak, then the same kernels under compute-sanitizer: memcheck must be clean,
# racecheck may report only what tests/gpu/racecheck_known.txt explains. Runs in the tree, after a build, and in the folder that scripts/stage.sh makes.
# SHARD=i/n: the i-th of n parts, i from 0. JOBS: processes that share the tests, also under the checkers; most of their time is the references' on the CPU (default: half of its cores, at most 8).
# SECONDS_TO_SOAK: of the soak (default 60; 0: none).
# STEPS: of "tests python soak ladder memcheck racecheck", those that are to run (default: all), where one sitting is too short for all.
# PYTHON: of the python step (default: the first of .venv/bin/python and python3 whose torch sees the GPU and that has pytest).
# FILTER, MEMCHECK_FILTER and RACECHECK_FILTER: other GoogleTest filters than its own.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=
for place in tests/heddle_gpu_tests build/release/tests/heddle_gpu_tests; do
  if [[ -x $place ]]; then tests=$place && break; fi
done
if [[ -z $tests ]]; then
  echo "test_gpu.sh: there is no heddle_gpu_tests: build the release preset with HEDDLE_CUDA=ON, or run in build/stage" >&2
  exit 1
fi
. scripts/find_cublaslt.sh
if [[ -n ${SHARD:-} ]]; then
  [[ $SHARD =~ ^([0-9]+)/([0-9]+)$ ]] && ((BASH_REMATCH[1] < BASH_REMATCH[2])) ||
    { echo "test_gpu.sh: SHARD is $SHARD: it must be i/n with i from 0 to n - 1" >&2; exit 2; }
  export GTEST_SHARD_INDEX=${BASH_REMATCH[1]} GTEST_TOTAL_SHARDS=${BASH_REMATCH[2]}
fi
all_steps="tests python soak ladder memcheck racecheck"
steps=${STEPS:-$all_steps}
for step in $steps; do
  [[ " $all_steps " == *" $step "* ]] || { echo "test_gpu.sh: STEPS is '$steps': the steps are $all_steps" >&2; exit 2; }
done
wanted() { [[ " $steps " == *" $1 "* ]]; }
logs=${LOGS:-build/logs}
mkdir -p "$logs"
rm -f "$logs"/{gpu,memcheck,racecheck}.*.{log,report} "$logs"/{planted,memcheck,racecheck}.log

jobs=${JOBS:-$(($(nproc) / 2 < 8 ? $(nproc) / 2 : 8))}
((jobs > 0)) || jobs=1
# $1: name of the logs, $2: filter, rest: what starts the tests. Shared out among processes; what they print comes in turn.
share_out() {
  local name=$1 filter=$2 job pids=() failed=
  shift 2
  for ((job = 0; job < jobs; ++job)); do
    JOB=$job GTEST_SHARD_INDEX=$((${GTEST_SHARD_INDEX:-0} * jobs + job)) GTEST_TOTAL_SHARDS=$((${GTEST_TOTAL_SHARDS:-1} * jobs)) \
      "$@" "$tests" --gtest_brief=1 --gtest_filter="$filter" >"$logs/$name.$job.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  cat "$logs/$name".*.log
  [[ -z $failed ]] || { echo "test_gpu.sh: tests failed; see $logs/$name.*.log" >&2; exit 1; }
}
if wanted tests; then
  share_out gpu "${FILTER:-*-*GpuDistributed*}" env
  # Without a GPU (HEDDLE_ALLOW_NO_GPU), no kernel runs and there is nothing to watch.
  if grep -q 'no test was run' "$logs/gpu.0.log"; then exit 0; fi
  # Ranks are threads of one process there, and one that loads a kernel only now could wait for another that waits for it.
  if [[ -z ${FILTER:-} ]]; then
    if "$tests" --gtest_list_tests --gtest_filter='*GpuDistributed*' | grep -q GpuDistributed; then
      CUDA_MODULE_LOADING=EAGER "$tests" --gtest_brief=1 --gtest_filter='*GpuDistributed*'
    else
      echo "attention over GPUs by NCCL in C++ is left out: this build has none (HEDDLE_NCCL, NCCL_ROOT)"
    fi
  fi
fi

sees_gpu() { "$1" -c 'import pytest, torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; }
if wanted python; then
  python=
  for each in ${PYTHON:-.venv/bin/python python3}; do
    if sees_gpu "$each"; then python=$each && break; fi
  done
  # A part has some of the files.
  files=()
  number=0
  for file in tests/python/test_cuda*.py tests/cli/test_cli_gpu.py; do
    if ((number++ % ${GTEST_TOTAL_SHARDS:-1} == ${GTEST_SHARD_INDEX:-0})); then files+=("$file"); fi
  done
  package=$PWD/python
  command=$PWD/bin/heddle
  if [[ -d build/release/python ]]; then package=$PWD/build/release/python command=$PWD/build/release/cli/heddle; fi
  if [[ -z $python ]]; then
    echo "Python's tests are left out: there is no Python here with pytest and a torch that sees a GPU; name one with PYTHON"
  elif ((${#files[@]})); then
    PYTHONPATH=$package HEDDLE_CLI=${HEDDLE_CLI:-$command} "$python" -m pytest -q -p no:cacheprovider "${files[@]}"
  fi
fi

# Hopper's copies and matrix products are nothing that the tools below follow; their races show as rows that change.
if wanted soak && ((${SECONDS_TO_SOAK:-60} > 0)); then SECONDS_TO_SOAK=${SECONDS_TO_SOAK:-60} LOGS=$logs scripts/soak_gpu.sh; fi

# Each rung of the ladder judges its own result. 3: it has no code for this GPU.
ladder=()
if [[ ${GTEST_SHARD_INDEX:-0} == 0 ]]; then
  for place in examples/ladder build/release/examples/ladder; do
    if [[ -x $place/1_naive ]]; then ladder=("$place"/[1-9]_*) && break; fi
  done
  if ((${#ladder[@]} == 0)); then
    echo "test_gpu.sh: there is no ladder: build the release preset with HEDDLE_CUDA=ON, or run in build/stage" >&2
    exit 1
  fi
fi
climb() {  # "$@": what runs a rung
  for rung in "${ladder[@]}"; do
    for problem in "128 0 1" "384 0 2" "384 1 2"; do
      # shellcheck disable=SC2086
      "$@" "$rung" $problem || (($? == 3)) || { echo "test_gpu.sh: $rung $problem failed" >&2 && exit 1; }
    done
  done
}
if wanted ladder; then climb env; fi

sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}
if [[ -z $sanitizer ]]; then
  for place in "${CUDA_HOME:-/usr/local/cuda}"/{bin,compute-sanitizer}/compute-sanitizer; do
    if [[ -x $place ]]; then sanitizer=$place && break; fi
  done
fi
if [[ -z $sanitizer ]]; then
  echo "test_gpu.sh: there is no compute-sanitizer; put it on the PATH, or name it with COMPUTE_SANITIZER" >&2
  exit 1
fi

# $1: tool, $2: filter, rest: options. The tests' own failures count too.
watch() {
  local tool=$1 filter=$2
  shift 2
  echo "compute-sanitizer $tool"
  share_out "$tool" "$filter" "$sanitizer" --tool "$tool" --log-file "$logs/$tool.%q{JOB}.report" "$@"
  cat "$logs/$tool".*.report >"$logs/$tool.log"
  grep 'SUMMARY' "$logs/$tool.log" | sort | uniq -c
}

# $1: tool, $2: what it may report, $3: the disabled test that it is to run. Whether it reports it.
reports() {
  env -u GTEST_SHARD_INDEX -u GTEST_TOTAL_SHARDS "$sanitizer" --tool "$1" --log-file "$logs/planted.log" \
    "$tests" --gtest_also_run_disabled_tests --gtest_filter="GpuKit.DISABLED_$3" >/dev/null 2>&1 || true
  grep -q "$2" "$logs/planted.log"
}
# As reports(): it must.
prove() {
  reports "$@" || { echo "test_gpu.sh: $1 does not report $3; see $logs/planted.log" >&2; exit 1; }
}

if wanted memcheck; then
  prove memcheck 'Invalid __global__ write' WritesPastItsMemory
  # Not the calls of many thousand rows and keys: the same code as often again, a quarter of the time of all. Nor NCCL's.
  watch memcheck "${MEMCHECK_FILTER:-*-*Addresses.*:*Repeats.*:*RepeatsToTheBit:*GpuLong*:*Coverage.*:*Streams.*:GpuKit.Failures*:*GpuDistributed*}" --leak-check no
  if (($(grep -c 'ERROR SUMMARY: 0 errors' "$logs/memcheck.log") != jobs)); then
    head -n 60 "$logs/memcheck.log" >&2
    echo "test_gpu.sh: memcheck found errors; all of them are in $logs/memcheck.log" >&2
    exit 1
  fi

  climb "$sanitizer" --tool memcheck --error-exitcode 9 --log-file "$logs/ladder_memcheck.log" >/dev/null
fi

wanted racecheck || exit 0
prove racecheck 'Race reported' Races
# Where it does not take MeetsUnevenly for a race, nothing excuses what it finds in kernels that meet so.
known=$logs/racecheck_known.txt
grep -vE '^(#|$)' tests/gpu/racecheck_known.txt >"$known"
met=
for _ in 1 2 3 4 5; do
  if reports racecheck 'Race reported' MeetsUnevenly; then met=1 && break; fi
done
if [[ -z $met ]]; then
  echo 'racecheck does not take MeetsUnevenly for a race: findings in sm90_decode are not excused'
  sed -i '/attention_decode/d' "$known"
fi
# racecheck takes a hundred times as long as the test alone: one row of each kind, of the dtypes that tell kernels apart.
rows='Cases/GpuForward.*'
back='Cases/GpuBackward.MatchesReference'
gradients="$back/round_s256_d64_causal_bf16:$back/round_s128_d128_f16:$back/round_s96_d80_gqa4_bf16:$back/round_s64_d256_f16"
gradients+=":$back/round_s64_d64_f32:$back/feature_all_scores_f*:$back/feature_packed_all_bf16:$back/feature_bias_columns_bf16"
some="$rows/round_*:$rows/feature_*_f16:$rows/feature_*_e4m3:$rows/decode_*_bf16:$rows/decode_f8_*:$gradients:GpuLinear.Clusters:GpuLinear.Epilogues:GpuLinear.NormInFront:GpuLinearGemv.*"
lists=Cases/GpuSparse select=Cases/GpuSelect
some+=":$lists.*/plain*:$lists.*/causal*:$lists.*/step*:$lists.*/rows*:$lists.*/group*:$lists.*/anchors*:$lists.*/neighbours*"
some+=":$select.*/plain:$select.*/few*:$select.*/many*:$select.*/paper*:$select.*/step*:$select.*/tiles*:Cases/GpuGateBranches.*/bf16:Cases/GpuPool.*/bf16"
some+=":GpuInt8QkValues.*:GpuEncoderEdges.*:GpuTransformerBlockEdges.OneRowAndNone:GpuTransformerBlockEdges.WideRows:GpuUnpackWeights.*"
watch racecheck "${RACECHECK_FILTER:-$some}" --racecheck-report analysis
if ! awk -v known="$known" -f tests/gpu/racecheck_new.awk "$logs/racecheck.log" >"$logs/racecheck_new.log"; then
  sort "$logs/racecheck_new.log" | uniq -c | head -20 >&2
  echo "test_gpu.sh: racecheck found what tests/gpu/racecheck_known.txt does not explain: $logs/racecheck_new.log" >&2
  exit 1
fi
