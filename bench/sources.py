"""Which sources a measured row is about, and a digest of what they say: a figure is as old as its kernel.

  python bench/sources.py --write build/stage/sources.json   # for a machine that has no sources
  python bench/sources.py --refine bench/results/*.json      # after a folder was divided: see refine()
  python bench/sources.py --reformat bench/results/*.json    # after a change of white space alone: see reformat()

Each path is a folder, a file or a pattern, from the root of the tree. Its digest is the first 12 hex digits of sha256 over
the sorted relative paths and bytes of its files. In a folder that scripts/stage.sh made, digests come from `sources.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGED = "sources.json"
# What all GPU kernels share: not the folders there that attention over lists alone has.
GPU_COMMON = ("src/cuda/common/*.*", "src/cuda/common/attention", "src/cuda/common/ptx")

DROPOUT = ("src/problem/philox.h",)
PLAIN = ("src/cuda/any/bounded_piece.h", "src/cuda/any/operand_dtype.h", "src/cuda/any/options.cuh", *DROPOUT)
SM80 = ("src/cuda/sm80/attention", "src/cuda/any/attention_int8_qk", *DROPOUT)
BACKWARD = ("src/cuda/any/attention_bwd_rows", "src/cuda/any/bounded_piece.h", "src/cuda/any/options.cuh", *DROPOUT)

#: candidate (as heddle.explain names it), whether of gradients -> what it is built from, beside what attention() adds
ATTENTION = {
    ("sm90", False): ("src/cuda/sm90/attention_fwd", "src/cuda/sm90/attention"),
    ("sm90", True): ("src/cuda/sm90/attention_bwd", "src/cuda/sm90/attention", *BACKWARD),
    ("sm90_fp8", False): ("src/cuda/sm90/attention_fwd_fp8", "src/cuda/sm90/attention"),
    ("sm90_decode", False): ("src/cuda/sm90/attention_decode", "src/cuda/any/row_band.*"),
    ("sm80", False): ("src/cuda/sm80/attention_fwd", "src/cuda/any/bounded_piece.h", *SM80),
    ("sm80", True): ("src/cuda/sm80/attention_bwd", "src/cuda/any/bounded_piece.h", *SM80, *BACKWARD),
    ("sm80_int8", False): ("src/cuda/sm80/attention_fwd", "src/cuda/any/bounded_piece.h", *SM80),
    ("sm80_decode", False): ("src/cuda/sm80/attention_decode", "src/cuda/any/row_band.*"),
    ("baseline_cuda", False): ("src/cuda/any/attention_baseline", *PLAIN),
    ("naive_cuda", False): ("src/cuda/any/naive_attention", *PLAIN),
}
#: What kernels of attention are handed.
ATTENTION_PROBLEM = ("src/problem/attention.h", "src/problem/int4_cache.h", "src/problem/rotary.h")
WALKS = (
    "src/problem/band.h",
    "src/problem/key_walk.h",
    "src/problem/tile_lists.h",
)  # what kernels of attention count tiles with
EVERY_ATTENTION = (*ATTENTION_PROBLEM, *WALKS, *GPU_COMMON)
ATTENTION_GPU = tuple(sorted({path for paths in ATTENTION.values() for path in paths} | {*EVERY_ATTENTION}))
LOWBIT_GPU = ("src/cuda/any/lowbit", "src/lowbit", "src/problem/quantize.*", *GPU_COMMON)
CUBLASLT = ("src/cuda/any/cublaslt", "src/cuda/any/lowbit", "src/cuda/any/linear", "src/lowbit/scale_rules.h", "src/problem/quantize.*")  # fmt: skip
LINEAR = {
    "sm90_w4a16": ("src/cuda/sm90/linear_w4a16", "src/cuda/sm90/linear", "src/cuda/any/linear"),
    "sm90_w4a8": ("src/cuda/sm90/linear_w4a8", "src/cuda/sm90/linear", "src/cuda/any/linear"),
    "sm80_linear": ("src/cuda/sm80/linear", "src/cuda/any/linear"),
    "sm80_gemv": ("src/cuda/sm80/linear_gemv", "src/cuda/any/linear"),
    "cublaslt": CUBLASLT,
    "cublaslt_w8a8": CUBLASLT,
}
EVERY_LINEAR = ("src/problem/linear.h", *GPU_COMMON)
INT4_CACHE = (
    "src/cuda/any/int4_cache",
    "src/problem/int4_append.h",
    "src/problem/int4_cache.h",
    "src/problem/rotary.h",
    *GPU_COMMON,
)
#: Of python/heddle/hosts/torch, what such calls go through.
TORCH_CALLS = tuple(
    f"python/heddle/hosts/torch/{name}.py"
    for name in (
        "__init__", "cache_operators", "checks", "direct", "functional", "gate_operators", "linear", "nsa_operators",
        "nsa_step_operator", "operators", "partial", "sdpa", "sparse_operators", "transforms",
    )
)  # fmt: skip
#: Of rows that a Python program feels: what a call of an operation on torch tensors goes through.
PYTHON = (
    "python/heddle/_linear_options.py",
    "python/heddle/_options.py",
    "python/heddle/functional.py",
    "python/heddle/hosts/__init__.py",
    "python/heddle/hosts/when_imported.py",
    *TORCH_CALLS,
    "python/heddle/lowbit/packed.py",
    "python/heddle/lowbit/product.py",
    "python/heddle/lowbit/tensor.py",
    "python/src",
)
ENCODER_GPU = (
    "src/model",
    "src/cuda/any/model",
    *ATTENTION["sm90", False],
    *ATTENTION["sm80", False],
    *(path for paths in LINEAR.values() for path in paths),
    *EVERY_ATTENTION,
    *EVERY_LINEAR,
)
#: Of native sparse attention on a GPU: its steps, and attention over pooled keys and in a window.
NSA_GPU = (
    "src/cuda/sm80/select_blocks",
    "src/cuda/sm90/select_blocks",
    "src/cuda/sm90/nsa_step",
    "src/cuda/common/sparse",
    "src/cuda/common/sparse_fwd",
    "src/cuda/sm80/sparse_bwd",
    "src/cuda/sm80/sparse_fwd",
    "src/cuda/sm90/sparse_fwd",
    "src/cuda/any/gate_branches",
    "src/cuda/any/pool_keys",
    "src/problem/gate_branches.h",
    "src/problem/nsa_step.h",
    "src/problem/pool.h",
    "src/problem/select_blocks.h",
    "src/problem/sparse.h",
    *ATTENTION["sm90", False],
    *ATTENTION["sm90", True],
    *ATTENTION["sm80", False],
    *ATTENTION["sm80", True],
    *EVERY_ATTENTION,
    "python/heddle/nsa",
    "python/heddle/sparse.py",
    *PYTHON,
)
#: Of attention over lists that whole tiles of rows share.
BLOCK_SPARSE_GPU = (
    "src/cuda/common/sparse/csr.h",
    "src/cuda/common/sparse/host.h",
    "src/cuda/common/sparse/params.h",
    "src/cuda/common/sparse/place.h",
    "src/cuda/common/tile_lists",
    "src/cuda/sm90/sparse_tiles_bwd",
    "src/cuda/sm90/sparse_tiles_fwd",
    "src/problem/sparse.h",
    *ATTENTION["sm90", False],
    *ATTENTION["sm90", True],
    *EVERY_ATTENTION,
)
LADDER = ("examples/ladder", *GPU_COMMON)
TRAINING = (
    *ATTENTION["sm90", False],
    *ATTENTION["sm90", True],
    *ATTENTION["sm80", False],
    *ATTENTION["sm80", True],
    *EVERY_ATTENTION,
    *PYTHON,
)
#: Of attention over the ranks of a group, beside what one GPU's call is built from.
RANKS = (
    "python/heddle/distributed",
    "src/cuda/any/attention_merge",
    "src/problem/operand_of.h",
    "src/problem/partial.h",
    *TORCH_CALLS,
)
CPU_TARGETS = ("src/cpu/scratch.h", "src/cpu/simd-inl.h", "src/cpu/unit-inl.h", "src/cpu/units", "src/cpu/targets")
CPU_CODES = ("src/cpu/lowbit_decode-inl.h", "src/cpu/lowbit_elements-inl.h")
CPU_ATTENTION = (
    "src/cpu/attention*", "src/cpu/decode*", "src/cpu/gemm-inl.h", "src/cpu/*keys-inl.h", "src/cpu/rows-inl.h", "src/cpu/scores-inl.h",
    "src/cpu/softmax-inl.h", "src/cpu/bias_gradient-inl.h", "src/cpu/plan.h", "src/cpu/task_walk.h", "src/cpu/key_gradients.h",
    "src/cpu/unused_rows.h", "src/problem/band.h", "src/problem/key_walk.h", *CPU_TARGETS, *CPU_CODES, *ATTENTION_PROBLEM, *DROPOUT,
)  # fmt: skip
CPU_SPARSE = (*CPU_ATTENTION, "src/cpu/sparse*", "src/cpu/listed_rows.h", "src/problem/sparse.h")
CPU_ADAPTIVE = (*CPU_ATTENTION, "src/cpu/adaptive*", "src/problem/adaptive.h")
CPU_NSA = (
    *CPU_SPARSE,
    "src/cpu/nsa.h",
    "src/cpu/pool*",
    "src/cpu/select_blocks*",
    "src/problem/pool.h",
    "src/problem/select_blocks.h",
    "python/heddle/nsa",
)
CPU_LINEAR = (
    "src/cpu/linear*", "src/cpu/gemm-inl.h", "src/cpu/row_ops*", "src/lowbit/int8_rows.h", "src/problem/linear.h", *CPU_TARGETS, *CPU_CODES,
)  # fmt: skip


def files(root: Path, path: str) -> list[Path]:
    """The files of a folder, or those that a path or pattern names; none of what Python compiled."""
    found = (root / path).rglob("*") if (root / path).is_dir() else root.glob(path)
    return sorted(f for f in found if f.is_file() and "__pycache__" not in f.parts and f.suffix not in (".pyc", ".so"))


def digest(path: str, root: Path = ROOT) -> str | None:
    """Of the sources here or, in a stage, of those that it was built from; None if neither is known."""
    staged = root / STAGED
    if staged.exists():
        return json.loads(staged.read_text(encoding="utf-8")).get(path)
    found = files(root, path)
    if not found:
        return None
    total = hashlib.sha256()
    for file in found:
        content = file.read_bytes()
        total.update(f"{file.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()[:12]


def digests(paths, root: Path = ROOT) -> dict[str, str | None]:
    """What a row carries as `sources`."""
    return {path: digest(path, root) for path in sorted(set(paths))}


def current(row: dict, root: Path = ROOT) -> bool:
    """Whether a row says what it was measured on, and the tree still has just that. A row of others alone, without a kernel
    of Heddle's, has no sources that could age."""
    said = row.get("sources")
    if said == {} and row.get("kernel") == "":
        return True
    return bool(said) and all(value is not None and value == digest(path, root) for path, value in said.items())


def attention(candidate: str, backward: bool = False) -> tuple[str, ...]:
    return (*ATTENTION[candidate, backward], *EVERY_ATTENTION)


def linear(candidate: str) -> tuple[str, ...]:
    return (*LINEAR[candidate], *EVERY_LINEAR)


def families() -> dict[str, tuple[str, ...]]:
    """Every kind of row by name -> its sources."""
    return {
        **{f"{name}{' gradients' * backward}": attention(name, backward) for name, backward in ATTENTION},
        **{name: linear(name) for name in LINEAR},
        "cache in 4 bits": INT4_CACHE,
        "weights to a format": LOWBIT_GPU,
        "encoder": ENCODER_GPU,
        "native sparse attention": NSA_GPU,
        "lists that tiles of rows share": BLOCK_SPARSE_GPU,
        "ladder": LADDER,
        "training": TRAINING,
        "attention over ranks of GPUs": (*ATTENTION_GPU, *RANKS),
        "host": PYTHON,
        "attention on the CPU": CPU_ATTENTION,
        "lists on the CPU": CPU_SPARSE,
        "attention with a tolerance on the CPU": CPU_ADAPTIVE,
        "native sparse attention on the CPU": CPU_NSA,
        "linear layers on the CPU": CPU_LINEAR,
    }


def known() -> list[str]:
    """Every path that a row may name."""
    return sorted({path for paths in families().values() for path in paths})


def at_commit(path: str, commit: str, folder: str) -> Path:
    """Puts what `path` names at that commit into a folder."""
    named = [":(glob)" + path] if "*" in path else [path]
    names = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit, "--", *(["."] if "*" in path else named)],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\n")  # fmt: skip
    wanted = [name for name in names if name and ("*" not in path or Path(name).match(path))]
    if wanted:
        packed = subprocess.run(["git", "archive", commit, *wanted], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x", "-C", folder], input=packed.stdout, check=True)
    return Path(folder)


def reformat(file: Path) -> None:
    """Where rows of a result file carry the digest of sources that differ from today's in white space alone, from a commit of
    the file's on: today's digest."""
    text = file.read_text(encoding="utf-8")
    commits = set(re.findall(r'"commit": "([0-9a-f]{7,40})"', text))

    def words(root: Path, path: str) -> list[tuple[str, bytes]]:
        return [(f.relative_to(root).as_posix(), b"".join(f.read_bytes().split())) for f in files(root, path)]

    for path, said in sorted(set(re.findall(r'"([^"]+)": "([0-9a-f]{12})"', text))):
        now = digest(path, ROOT)
        if now in (None, said):
            continue
        for commit in commits:
            with tempfile.TemporaryDirectory() as folder:
                at = at_commit(path, commit, folder)
                if digest(path, at) == said and words(at, path) == words(ROOT, path):
                    text = text.replace(f'"{path}": "{said}"', f'"{path}": "{now}"')
                    break
    file.write_text(text, encoding="utf-8")


def refine(file: Path) -> None:
    """Where rows of a result file carry the digest of a folder that they would name by its parts now: the digests of those
    parts, as they were at a commit of the file's at which the folder was what the rows say."""
    text = file.read_text(encoding="utf-8")
    commits = set(re.findall(r'"commit": "([0-9a-f]{7,40})"', text))
    for path, said in sorted(set(re.findall(r'"([^"]+)": "([0-9a-f]{12})"', text))):
        parts = [part for part in (*GPU_COMMON, *TORCH_CALLS) if part.startswith(f"{path}/")]
        if path in known() or not parts:
            continue
        for commit in commits:
            with tempfile.TemporaryDirectory() as folder:
                at = Path(folder)
                packed = subprocess.run(["git", "archive", commit, path], cwd=ROOT, check=True, capture_output=True)
                subprocess.run(["tar", "x", "-C", folder], input=packed.stdout, check=True)
                if digest(path, at) != said:
                    continue
                lines = [f'"{part}": "{value}"' for part, value in digests(parts, at).items() if value is not None]
            text = re.sub(
                rf'(\s*)"{path}": "{said}"', lambda found, lines=lines: ",".join(found[1] + x for x in lines), text
            )
            break
        else:
            raise SystemExit(f"{file}: {path} was not {said} at any of its commits")
    file.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, help="the file of digests")
    what.add_argument("--refine", type=Path, nargs="+", metavar="FILE", help="result files")
    what.add_argument("--reformat", type=Path, nargs="+", metavar="FILE", help="result files")
    options = parser.parse_args()
    if options.reformat:
        for file in options.reformat:
            reformat(file)
        return
    if options.refine:
        for file in options.refine:
            refine(file)
        return
    out = options.write
    found = {path: digest(path) for path in known()}
    if missing := [path for path, value in found.items() if value is None]:
        parser.error(f"no sources at {', '.join(missing)}")
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
