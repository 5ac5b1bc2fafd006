#!/usr/bin/env bash
# Builds from clean and runs every test. The long quiet steps come first and print only when they fail; the closing lines
# of ctest and pytest come last.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh --dev
python=.venv/bin/python
PATH=$(scripts/nvcc.sh):$PATH  # the GPU kernels are compiled; running them takes `make test-gpu`
export PATH
# nvcc's -gencode looks like a debugging flag to ccache, which would then keep each build folder's kernels apart; and
# paths in the tree are compared from its root, so that another clone's objects serve.
export CCACHE_NOHASHDIR=1 CCACHE_BASEDIR=$PWD
rm -rf build
mkdir -p build/logs

# $1: name, $2: what it does, rest: command. Says so before, and prints the time it took, or its output if it fails.
step() {
  local name=$1 words=$2 begun=$SECONDS
  shift 2
  printf '%-14s %-92s ' "$name" "$words"
  # Not as the condition itself: in one, every command of a function but the last may fail unnoticed.
  "$@" >"build/logs/$name.log" 2>&1 &
  if ! wait $!; then
    echo FAILED
    tail -n 100 "build/logs/$name.log"
    echo "FAILED: $name ($*); all of its output is in build/logs/$name.log" >&2
    exit 1
  fi
  printf '%4d s\n' $((SECONDS - begun))
}

# What scripts write into pages: from the library's answers, and from the figures in bench/results.
tables() {
  local script
  export PYTHONPATH=build/release/python
  for script in support lowbit gpu slower measured encoder numerics ranks; do
    "$python" "scripts/${script}_table.py" --check || return 1
  done
  "$python" scripts/ladder_tables.py --check && "$python" scripts/speed_chart.py --check &&
    "$python" scripts/nsa_chart.py --check && "$python" scripts/ranks_chart.py --check && "$python" examples/train/report.py --check
}

format() {
  git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror
  .venv/bin/ruff format --check .
  .venv/bin/ruff check .
}

# Nothing runs the kernels here: one architecture's code of each says whether it compiles and does not spill.
release() {
  cmake --preset release -DHEDDLE_CUDA=ON -DHEDDLE_CUDA_ONE_CODE=ON -DHEDDLE_NCCL=ON -DNCCL_ROOT="$(scripts/nccl.sh)"
  cmake --build --preset release
}

# The machine code of Hopper's kernels: nothing gives shared memory back while it is still read, but for the kernel that
# the soak builds without its fences. To look at float16's, too, would take as long again; they are the same source.
hand_overs() {
  local unfenced
  CUOBJDUMP=$(scripts/cuobjdump.sh)
  export CUOBJDUMP
  unfenced=$(find build/release/tests/soak -path '*sm90/attention_fwd/f16_d128.cu.o')
  if "$python" scripts/check_hand_overs.py "$unfenced"; then
    echo "check_hand_overs.py does not see what is wrong with $unfenced" >&2
    return 1
  fi
  # Attention over lists hands over by barriers of all threads alone.
  find build/release/src -path '*cuda/sm90*' -name '*.cu.o' ! -name 'f16_*' ! -path '*sparse_fwd*' -print0 |
    xargs -0 "$python" scripts/check_hand_overs.py
}

# The package as a user installs it, not the one in the build folder: a wheel, tried in empty environments; and what `pip install .`
# builds, of the wheel's objects. Neither has GPU kernels, whose answers some of the Python tests ask for: these take the release
# build's. By CMake's name of the compiler: Python has another for the same one, and ccache would keep its objects apart.
package() {
  DIST=build/dist PYTHONS=$PWD/$python PACKAGES_OF=$PWD/$python scripts/wheels.sh cpu
  CC=cc CXX=c++ "$python" -m pip install --disable-pip-version-check --no-deps -v --no-build-isolation --target build/installed . 2>&1 | tee build/logs/pip_install.log
  PYTHONPATH=build/installed "$python" tests/python/float_layers.py | grep -x runs
  grep 'gets no GPU kernels, since nobody asked for them' build/logs/pip_install.log
}

# -O1: the fastest sum of building and running. Tests whose own statements are not watched are the release build's objects. One
# thread for each half of the tests. Of the processor's targets the widest alone: what reads or writes beside its memory does so
# at a vector's ends, and they lie farthest apart there.
sanitize() {
  local widest
  widest=$(build/release/cli/heddle info --json | "$python" -c 'import json, sys
runnable = json.load(sys.stdin)["runnable_targets"]
print(next((name for name in ("avx512_bf16", "avx512", "avx2") if name in runnable), "sse4"))')
  cmake --preset sanitize -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DHEDDLE_X86_TARGETS="$widest" \
    -DHEDDLE_TESTS_OF="$PWD/build/release"
  cmake --build --preset sanitize --target heddle_tests
  # Without what says whether the accuracy rule bites, whether many rows keep their bits, and what is only large, since others
  # call the same code; without float16's rows of the table, which many tests besides have; and without those rows in e4m3, which
  # the reference alone computes here, that only hold other values.
  local tests shard pids=() without='AloneByItself.*:CaseTable.*:DataToCome.ChangesNoAnswer:Kit/*:Int8Qk.KeysFarFromZeroMustBeSmoothed:SafeTensorsWriter.WritesVeryManyTensors:*Sparse.*/neighbours:*Sparse.*/neighbours_packed:*_many_tiles_*:Cases/Attention*ward.*_f16:*/feature_e4m3_*large_logits*:*/feature_e4m3_scale_*'
  tests=$(find build/sanitize -name heddle_tests -type f -executable)
  for shard in 0 1; do
    # The leak checker's own record of thread-local memory falls over that of libraries opened late, as oneDNN's are.
    ASAN_OPTIONS=intercept_tls_get_addr=0 GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$shard "$tests" --gtest_brief=1 --gtest_filter="-$without" >"build/logs/sanitize.$shard.log" 2>&1 &
    pids+=($!)
  done
  local failed=0
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  cat build/logs/sanitize.[01].log
  return $failed
}

# A minute in all, on the seeds and on what earlier runs found worth keeping.
fuzz() {
  cmake --preset fuzz
  cmake --build --preset fuzz
  local targets target name
  targets=(build/fuzz/tests/fuzz/*_fuzz)
  for target in "${targets[@]}"; do
    name=$(basename "$target" _fuzz)
    mkdir -p "build/fuzz/found/$name"
    "$target" -max_total_time=$((60 / ${#targets[@]})) -print_final_stats=1 -artifact_prefix="build/fuzz/" \
      "build/fuzz/found/$name" "build/fuzz/tests/fuzz/seeds/$name"
  done
}

step format "clang-format and ruff agree with every source" format
step types "mypy agrees with the annotations of the Python package" "$python" -m mypy
step layers "includes follow the arrows of docs/architecture.md" "$python" scripts/check_layers.py
step headers "each header of the CPU's kernels compiles alone" scripts/check_cpu_headers.sh
step release "library, GPU kernels, command, Python module, tests and benchmarks, optimised" release
step hand_overs "machine code of Hopper's kernels: no memory is given back while it is read" hand_overs
step consumer "users' projects: find_package, pkg-config, FetchContent" scripts/test_consumer.sh
step sanitize "the C++ tests under the address and undefined-behaviour sanitizers" sanitize
step fuzz "fuzzers of files, arguments and low-bit weights, a minute" fuzz
step neon "NEON kernels over the smaller cases of the table, under an emulator" scripts/test_neon.sh
step docs "the site of the pages and of the reference: no link, anchor, page or public name is lost" scripts/docs.sh --check
step package "the wheel in empty environments, without torch and beside it; pip install of the sources" package
step tables "tables of the pages are what the library and the results files say" tables

echo "Now the C++ tests, then the Python tests; build/logs has what the steps above printed."
ctest --preset release -j2 --progress
PYTHONPATH=$PWD/build/release/python HEDDLE_CLI=$PWD/build/release/cli/heddle \
  HEDDLE_SERVER=$PWD/build/release/examples/server/heddle_server "$python" -m pytest -q -n 2 --dist loadfile tests/python tests/cli tests/examples
