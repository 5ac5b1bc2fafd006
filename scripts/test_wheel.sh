#!/usr/bin/env bash
# Installs the wheels of dist/cpu, or those given, as a machine without a compiler would: into empty environments of every
# interpreter here that takes them, without torch, with `false` for a compiler; then one of them beside torch, where the pages'
# Python and the example that needs no GPU run, too. `make wheels` and `make test` run it. PYTHONS: interpreters to try.
# PACKAGES_OF: an interpreter of one of these versions whose numpy and torch are taken in place of installing them, which takes
# a minute and an index.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

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
import sys

import heddle
import torch

assert heddle.__file__.startswith(sys.prefix), heddle.__file__
q, k, v = torch.randn(3, 1, 8, 100, 64, requires_grad=True).unbind()
ours, theirs = (f(q, k, v, is_causal=True) for f in (heddle.sdpa, torch.nn.functional.scaled_dot_product_attention))
assert (ours - theirs).abs().max() < 1e-5
ours.sum().backward()
EOF
# The pages' blocks, one after the other, but those that want more than torch; what they print is what their comments say.
cat >"$work/pages.py" <<'EOF'
import contextlib
import io
import pathlib
import re
import sys

for page in sys.argv[1:]:
    names, ran = {}, 0
    for block in re.findall(r"^```python\n(.*?)^```", pathlib.Path(page).read_text(), re.MULTILINE | re.DOTALL):
        if "transformers" in block:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, page, "exec"), names)
        said = re.findall(r"^\s*print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert said == printed.getvalue().splitlines(), (page, said, printed.getvalue())
        ran += 1
    assert ran > 2, page
EOF
# Files that the loader meets first and cannot load hide oneDNN.
mkdir "$work/hidden"
touch "$work/hidden/libdnnl.so.2" "$work/hidden/libdnnl.so.3"

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
  install=("$bin/python" -m pip install -qq --disable-pip-version-check --no-compile --only-binary=:all:)
  packages=$(echo "$env"/lib/python*/site-packages)
  if [[ -n ${PACKAGES_OF:-} ]]; then
    theirs=$("$PACKAGES_OF" -c 'import os, numpy; print(os.path.dirname(os.path.dirname(numpy.__file__)))')
    ln -s "$theirs"/numpy* "$packages/"
  else
    bare "$bin" "${install[@]}" numpy
  fi
  bare "$bin" "${install[@]}" --no-index --no-deps "$wheel"
  bare "$bin" "$bin/python" numpy_alone.py
  bare "$bin" heddle info >"$work/info"
  bare "$bin" "$bin/python" -m heddle info >"$work/info_of_module"
  cmp <(head -n 2 "$work/info") <(head -n 2 "$work/info_of_module")  # what follows is the machine's state
  bare "$bin" heddle explain --length 100 >/dev/null
  module=$(echo "$env"/lib/python*/site-packages/heddle/libheddle_onednn.so)
  unloadable=$([[ -e $module ]] && echo 'need oneDNN, which cannot be loaded: .*libdnnl[.]so' || echo 'need oneDNN, and this heddle was built without')
  bare "$bin" LD_LIBRARY_PATH="$work/hidden" "$bin/python" "$root/tests/python/float_layers.py" >"$work/refused"
  grep -q "$unloadable" "$work/refused" || { echo "test_wheel.sh: without oneDNN a float layer says: $(<"$work/refused")" >&2; exit 1; }
  # The wheel's oneDNN need not be the system's; where it is, float layers run.
  float_layers=$(bare "$bin" "$bin/python" "$root/tests/python/float_layers.py")
  soname=none
  if [[ -e $module ]]; then soname=$(readelf -d "$module" | sed -n 's/.*\[\(libdnnl.*\)\]/\1/p'); fi
  if [[ $float_layers != runs ]] && { ldconfig -p | grep -qF "$soname" || ! grep -q "$unloadable" <<<"$float_layers"; }; then
    echo "test_wheel.sh: with the system's libraries a float layer says: $float_layers" >&2
    exit 1
  fi
  with=''
  requirement=$(grep '^torch==' scripts/requirements.txt)
  # Once: it takes most of the time. Where there is no torch for an interpreter, another one's has to do.
  if [[ -z $torch && -n ${PACKAGES_OF:-} ]]; then
    echo "$theirs" >"$packages/torch.pth"  # behind the environment's own packages
    bare "$bin" "$bin/python" -c "import torch; assert torch.__version__.split('+')[0] == '${requirement#*==}', torch.__version__"
    torch=ready
  elif [[ -z $torch ]] && bare "$bin" "${install[@]}" "$requirement" 2>"$work/torch.log"; then
    torch=ready
  fi
  if [[ $torch == ready ]]; then
    bare "$bin" "$bin/python" beside_torch.py
    bare "$bin" "$bin/python" pages.py "$root"/{README,docs/start}.md
    bare "$bin" "$bin/python" "$root/examples/train/train.py" --device cpu --layers 1 --heads 2 --head-size 16 \
      --context 64 --batch 2 --steps 3 >/dev/null
    torch=$version with=", and beside $requirement with the pages' Python and examples/train"
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
