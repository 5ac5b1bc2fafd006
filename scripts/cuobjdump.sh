#!/usr/bin/env bash
# Prints the path of a cuobjdump, which comes with CUDA's compiler or was put into .venv by `setup.sh --dev`. Fails where
# there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

for program in "${CUOBJDUMP:-}" "$(command -v cuobjdump || true)" "$(scripts/nvcc.sh 2>/dev/null || true)/cuobjdump" \
  .venv/lib/python3*/site-packages/nvidia/cu13/bin/cuobjdump; do
  if [[ -n $program && -f $program ]]; then
    [[ -x $program ]] || chmod +x "$program"  # as its package brings it
    realpath "$program"
    exit 0
  fi
done
exit 1
