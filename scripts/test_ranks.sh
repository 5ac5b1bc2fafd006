#!/usr/bin/env bash
# Attention over several processes with every case, number of ranks and scheme, over threads, MPI and gloo, on the CPU: make test takes
# a part of that, in turns. Runs after a build of the release preset.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/release
for program in tests/heddle_tests cli/heddle; do
  [[ -x $build/$program ]] || { echo "test_ranks.sh: there is no $build/$program: build the release preset" >&2; exit 1; }
done
export HEDDLE_EVERY_SCHEME=1
"$build/tests/heddle_tests" --gtest_brief=1 --gtest_filter='*Distributed*'
if [[ -x $build/tests/heddle_mpi_tests ]]; then
  # More processes than cores, and as root in a container, need Open MPI's leave.
  export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  for ranks in 1 2 3 4 8; do
    echo "over MPI, $ranks ranks"
    HEDDLE_NUM_THREADS=1 mpiexec -n "$ranks" "$build/tests/heddle_mpi_tests" --gtest_brief=1
  done
else
  echo "test_ranks.sh: $build has no heddle_mpi_tests, as there was no MPI: threads and gloo alone"
fi
PYTHONPATH=$PWD/$build/python .venv/bin/python -m pytest -q tests/python/test_distributed.py
