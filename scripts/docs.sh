#!/usr/bin/env bash
# Builds the site of the pages, build/docs/index.html, which needs no network to be read: the Markdown files as they are, and the
# reference of Python (docstrings), C++ (the public headers) and the command (its --help). A warning is an error: a link or an
# anchor that leads nowhere, a page that docs/README.md does not list, a file of results that is not there, a public name without a
# place. `--check` looks for these and writes no site.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  "") builder=html out=build/docs ;;
  --check) builder=dummy out=build/docs-check ;;
  *) echo "docs.sh: unknown option $1; there is only --check" >&2; exit 2 ;;
esac
scripts/setup.sh --docs
python=.venv-docs/bin/python
export PYTHONPATH=${PYTHONPATH:-build/release/python}
command=${HEDDLE_CLI:-build/release/cli/heddle}
if ! "$python" -c 'import heddle'; then
  echo "docs.sh: the Python module is not in $PYTHONPATH: build it (cmake --preset release && cmake --build --preset release), or say in PYTHONPATH where it is" >&2
  exit 1
fi
if [[ ! -x $command ]]; then
  echo "docs.sh: there is no $command: build it, or say in HEDDLE_CLI where it is" >&2
  exit 1
fi

"$python" scripts/docs/write_reference.py "$command"
rm -rf "$out" build/docs-cache
"$python" -m sphinx -b "$builder" -q -W --keep-going -j 2 -c scripts/docs -d build/docs-cache . "$out"
[[ $builder == dummy ]] || echo "$out/index.html"
