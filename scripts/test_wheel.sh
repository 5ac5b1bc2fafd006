#!/usr/bin/env bash
# Installs the wheels of dist/cpu, or those given, as a machine without a compiler would: into empty environments of every
# interpreter here that takes them, without torch, with `false` for a compiler; then one of them beside torch.
# `make wheels` runs it. PYTHONS: interpreters to try.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=("$@")
((${#wheels[@]})) || wheels=(dist/cpu/*.whl)
[[ -e ${wheels[0]} ]] || { echo "test_wheel.sh: there is no ${wheels[0]}; make wheels builds them" >&2; exit 1; }
mapfile -t wheels < <(realpath "${wheels[@]}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
candidates=(python3.10 python3.11 python3.12 python3.13 python3.14)
for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin; do candidates+=("$folder/python3"); done
if [[ -n ${PYTHONS:-} ]]; then read -ra candidates <<<"$PYTHONS"; fi

cat >"$work/numpy_alone.py" <<'EOF'
import sys

import heddle
import numpy as np

assert heddle.__file__.startswith(sys.prefix), heddle.__file__
rng = np.random.default_rng(1)
q = rng.standard_normal((2, 70, 4, 64), dtype=np.float32)
k, v = rng.standard_normal((2, 2, 90, 2, 64), dtype=np.float32)
out = heddle.attention(q, k, v, causal="bottom_right")
wide = [np.repeat(x.astype(np.float64), 2, axis=2) for x in (k, v)]
logits = np.einsum("bqhd,bkhd->bhqk", q, wide[0]) / 8
logits[..., np.arange(90) > np.arange(70)[:, None] + 20] = -np.inf
weights = np.exp(logits - logits.max(-1, keepdims=True))
expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), wide[1])
error = abs(out - expected).max()
assert error < 1e-5, error
try:
    heddle.attention(np.ma.masked_array(q), k, v)
except Exception as refusal:
    assert "MaskedArray" in str(refusal), refusal
else:
    raise AssertionError("a masked array was taken")
assert "torch" not in sys.modules
EOF
cat >"$work/beside_torch.py" <<'EOF'
import heddle
import torch

q, k, v = torch.randn(3, 1, 8, 100, 64, requires_grad=True).unbind()
ours, theirs = (f(q, k, v, is_causal=True) for f in (heddle.sdpa, torch.nn.functional.scaled_dot_product_attention))
assert (ours - theirs).abs().max() < 1e-5
ours.sum().backward()
EOF

# Nothing but the environment's own programs, and no compiler under any name that a build would ask for.
bare() { (cd "$work" && env -u PYTHONPATH -u LD_LIBRARY_PATH PATH="$1" CC=false CXX=false CUDACXX=false NVCC=false "${@:2}"); }

tried='' torch=''
for candidate in "${candidates[@]}"; do
  version=$("$candidate" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  [[ " $tried " != *" $version "* ]] || continue
  case $version in 3.10 | 3.11) tag=cp${version/./}-cp ;; 3.1[2-9]) tag=-abi3- ;; *) continue ;; esac
  wheel=''
  for one in "${wheels[@]}"; do [[ $one != *"$tag"* ]] || wheel=$one; done
  [[ -n $wheel ]] || continue
  env=$work/$version bin=$work/$version/bin
  "$candidate" -m venv "$env"
  install=("$bin/python" -m pip install -qq --disable-pip-version-check --only-binary=:all:)
  bare "$bin" "${install[@]}" numpy
  bare "$bin" "${install[@]}" --no-index --no-deps "$wheel"
  bare "$bin" "$bin/python" numpy_alone.py
  bare "$bin" heddle info >"$work/info"
  bare "$bin" "$bin/python" -m heddle info >"$work/info_of_module"
  cmp <(head -n 2 "$work/info") <(head -n 2 "$work/info_of_module")  # what follows is the machine's state
  bare "$bin" heddle explain --length 100 >/dev/null
  with=''
  requirement=$(grep '^torch==' scripts/requirements.txt)
  # Once: it takes most of the time. Where there is no torch for an interpreter, another one's has to do.
  if [[ -z $torch ]] && bare "$bin" "${install[@]}" "$requirement" 2>"$work/torch.log"; then
    bare "$bin" "$bin/python" beside_torch.py
    torch=$version with=", and beside $requirement"
  fi
  echo "$(basename "$wheel") works in Python $version$with"
  tried+=" $version"
  rm -rf "$env"
done
if [[ -z $tried ]]; then
  echo "test_wheel.sh: no interpreter here takes any of ${wheels[*]}" >&2
  exit 1
fi
if [[ -z $torch ]]; then
  echo "test_wheel.sh: torch could not be installed for any of$tried:" >&2
  tail -n 5 "$work/torch.log" >&2
  exit 1
fi
