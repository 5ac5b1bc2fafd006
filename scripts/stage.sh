#!/usr/bin/env bash
# Builds build/stage: what a machine with a GPU and no compiler needs to run `make test-gpu`, `make soak-gpu`, `make bench-gpu` and the Python tests. Copy the
# folder there, then run scripts/test_gpu.sh in it. PYTHON_STAGE: the interpreter to build the Python module for, of that
# machine's version (default: python3.12; without it the stage has no Python). The kernels are those of every build.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
build=$root/build/stage-build
stage=$root/build/stage
limit_mib=96

nvcc=$(scripts/nvcc.sh) || { echo "stage.sh: there is no nvcc 12.8 or later; scripts/setup.sh --dev installs one" >&2; exit 1; }
export PATH=$nvcc:$PATH
tools=${PYTHON:-.venv/bin/python}
# One library for all that runs there, found beside it.
options=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DHEDDLE_CUDA=ON -DHEDDLE_ONEDNN=OFF -DHEDDLE_EMU128=OFF -DHEDDLE_BUILD_BENCH=OFF
  -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=\$ORIGIN/../lib;\$ORIGIN/../../lib")
targets=(heddle_cli heddle_gpu_tests heddle_soak heddle_soak_planted ladder)
python=$(command -v "${PYTHON_STAGE:-python3.12}" || true)
if [[ -n $python ]] && "$python" -c 'import sysconfig, os; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
  options+=(-DHEDDLE_BUILD_PYTHON=ON "-DPython_EXECUTABLE=$("$python" -c 'import sys; print(sys.executable)')"
    "-Dnanobind_ROOT=$("$tools" -m nanobind --cmake_dir)")
  targets+=(_heddle)
elif [[ -n ${PYTHON_STAGE:-} ]]; then
  echo "stage.sh: PYTHON_STAGE is $PYTHON_STAGE, which is no interpreter with its headers" >&2
  exit 1
else
  echo "stage.sh: there is no python3.12 with its headers: the stage has no Python module (see PYTHON_STAGE)" >&2
  python=
fi

if nccl=$(scripts/nccl.sh); then options+=("-DNCCL_ROOT=$nccl"); fi

cmake -S . -B "$build" "${options[@]}"
cmake --build "$build" --target "${targets[@]}"

rm -rf "$stage"
mkdir -p "$stage"/{bin,lib,tests/gpu,scripts,examples/ladder}
install -s "$build"/src/libheddle.so.? "$stage/lib/"
for library in "$build"/src/libheddle_nccl.so.?; do  # where the build has found NCCL, for the tests of ranks
  if [[ -e $library ]]; then install -s "$library" "$stage/lib/"; fi
done
install -s "$build/cli/heddle" "$stage/bin/"
install -s "$build"/tests/{heddle_gpu_tests,soak/heddle_soak,soak/heddle_soak_planted} "$stage/tests/"
install -s "$build"/examples/ladder/* "$stage/examples/ladder/"
cp scripts/{{test,soak}_gpu,find_cublaslt}.sh "$stage/scripts/"
cp tests/gpu/racecheck_{known.txt,new.awk} "$stage/tests/gpu/"
if [[ -n $python ]]; then
  mkdir -p "$stage/python/heddle" "$stage"/tests/{python,cli}
  (cd python && find heddle -name '*.py' -o -name py.typed | xargs cp --parents -t "$stage/python")
  install -s "$build"/python/heddle/_heddle*.so "$stage/python/heddle/"
  cp tests/python/*kit.py tests/python/test_cuda*.py tests/python/{cuda,decode,distributed}_ranks.py "$stage/tests/python/"
  cp tests/cli/{command,conftest,test_cli_gpu}.py "$stage/tests/cli/"
  for module in $(sed -nE 's/^(from|import) (\w+).*/\2/p' "$stage"/tests/python/*.py | sort -u); do
    if [[ -e tests/python/$module.py && ! -e $stage/tests/python/$module.py ]]; then
      echo "stage.sh: a staged test imports $module, which the stage does not have" >&2
      exit 1
    fi
  done
  mkdir -p "$stage"/{bench,examples/train}
  cp examples/train/*.py "$stage/examples/train/"
  # encoder_gpu.py runs over a folder that it prepares elsewhere. What is measured there says which sources it is of, which are here.
  cp bench/{attention_bench,encoder,ladder,ranks}_gpu.py bench/gpu_*.py bench/{sources,merge}.py "$stage/bench/"
  "$tools" bench/sources.py --write "$stage/sources.json"
  "$tools" bench/gpu_conditions.py >"$stage/commit"
  cp scripts/bench_gpu.sh "$stage/scripts/"
  mkdir -p "$stage/scripts/demo"
  cp scripts/demo/*.py "$stage/scripts/demo/"
fi

for binary in "$stage"/{lib/libheddle.so.?,bin/heddle,tests/heddle_{gpu_tests,soak,soak_planted}}; do
  if readelf -d "$binary" | grep NEEDED | grep -vE 'lib(heddle|heddle_nccl|nccl|stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so|ld-linux'; then
    echo "stage.sh: $binary needs these libraries, which a bare machine does not have" >&2
    exit 1
  fi
done
mib=$(du -sm "$stage" | cut -f1)
echo "$stage: $mib MiB"
if ((mib > limit_mib)); then
  echo "stage.sh: more than $limit_mib MiB" >&2
  exit 1
fi
