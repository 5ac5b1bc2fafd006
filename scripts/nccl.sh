#!/usr/bin/env bash
# Prints the folder of an NCCL (2.18 or later) with its header, for CMake's NCCL_ROOT: what NCCL_ROOT names, the system's, or what
# `setup.sh --dev` put into .venv. Fails where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

for root in "${NCCL_ROOT:-}" /usr .venv/lib/python3*/site-packages/nvidia/nccl; do
  if [[ -n $root && -f $root/include/nccl.h ]]; then
    realpath "$root"
    exit 0
  fi
done
exit 1
