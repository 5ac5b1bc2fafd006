"""bench/sources.py: whether what a row names is all that its kernel is built from, and all that its call runs through."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import sources  # noqa: E402

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
CODE = (".h", ".cc", ".cu", ".cuh")
NO_KERNEL = "nothing of it runs in a kernel"
# What no row need name: path, or the beginning of one -> why.
EXCEPTIONS = {
    "include/heddle/": "the interface; what kernels see of it stands in src/problem",
    "src/core/": "checks, threads and sizes, of which no kernel is made",
    "src/cuda/assumed_gpu.h": NO_KERNEL,
    "src/cuda/backend.h": NO_KERNEL,
    "src/cuda/kernels.h": "declarations of every candidate",
    "src/cuda/linear.h": "declarations of every candidate",
    "src/cuda/cost.h": "estimates, which choose; a row names what was chosen",
    "src/cuda/any/moved_bytes.h": "estimates",
    "src/problem/attended_pairs.h": "estimates",
    "src/problem/candidate.h": NO_KERNEL,
    "src/cpu/kernels.h": "a table of every kernel",
    "src/cpu/linear_kernels.h": "a table of every kernel",
    "src/cpu/lowbit_kernels.h": "a table of every kernel",
    "src/cpu/target-inl.h": "fills the tables",
    "src/lowbit/formats.h": "a format to the bit: another gives other results, and tests fail",
    "src/lowbit/fragments.h": "a layout to the bit",
    "src/lowbit/matrix.h": "a layout to the bit",
    "src/lowbit/matrix_order.h": "a layout to the bit",
    "src/lowbit/packed.h": "a layout to the bit",
}
FOR_ATTENTION = "included by what every operation shares, for attention's sake"
OF_LAYERS = {"src/problem/attention.h": FOR_ATTENTION}
OF_ENCODER = {
    "src/checkpoint/": "read before the clock runs",
    "src/cpu/row_ops.h": "read before the clock runs",
    "src/cuda/model.h": "declarations",
    "src/ops/": "checks and choice",
    "src/distributed/": "several processes, which no row has",
}
# Beside those, of a family of rows alone.
OF_FAMILY = {
    **dict.fromkeys((*sources.LINEAR, "weights to a format"), OF_LAYERS),
    "cache in 4 bits": OF_LAYERS,
    "encoder": OF_ENCODER,
    "linear layers on the CPU": dict.fromkeys(
        ("src/problem/attention.h", "src/problem/band.h", "src/cpu/plan.h"), FOR_ATTENTION
    ),
}


def included(file):
    """The tree's files that a file includes."""
    for name in INCLUDE.findall(file.read_text(encoding="utf-8")):
        found = (folder / name for folder in (file.parent, ROOT / "src", ROOT / "include"))
        yield from [path.resolve() for path in found if path.is_file()][:1]


def unnamed(paths, exceptions):
    """Files that what `paths` name includes, or that implement a header of it, and that they do not name -> what led there."""
    named = {file for path in paths for file in sources.files(ROOT, path)}
    # What all GPU kernels share is named whole; of it, only what is reached is looked into.
    common = {file for path in sources.GPU_COMMON for file in sources.files(ROOT, path)}
    waiting = [file for file in sorted(named - common) if file.suffix in CODE]
    seen, missing = set(waiting), {}
    while waiting:
        file = waiting.pop()
        beside = [file.with_suffix(suffix) for suffix in (".cc", ".cu")] if file.suffix in (".h", ".cuh") else []
        for found in (*included(file), *(path for path in beside if path.is_file())):
            path = found.relative_to(ROOT).as_posix()
            if found in seen or path.startswith(tuple(exceptions)):
                continue
            seen.add(found)
            waiting.append(found)
            if found not in named:
                missing[path] = file.relative_to(ROOT).as_posix()
    return missing


def test_a_row_that_python_feels_names_the_modules_that_its_call_runs_through():
    torch = pytest.importorskip("torch")
    heddle = pytest.importorskip("heddle")
    heddle_root = Path(heddle.__file__).parent
    x = torch.randn(1, 8, 2, 32)
    leaves = [torch.randn(1, 2, 8, 32, requires_grad=True) for _ in range(3)]
    packed = heddle.lowbit.pack(heddle.lowbit.quantize(torch.randn(32, 64), "nvfp4"))
    modules = set()

    def watch(frame, event, argument):
        modules.add(frame.f_code.co_filename)

    def call():  # bench/gpu_rows.py's, gpu_backward_rows.py's, gpu_linear_rows.py's and gpu_lowbit_rows.py's
        heddle.attention(x, x, x)
        heddle.sdpa(*leaves).sum().backward()
        heddle.lowbit.linear(torch.randn(1, 64), packed)
        heddle.lowbit.quantize(torch.randn(32, 64), "int8_row")

    call()  # the first one imports
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    ran = {Path(name).relative_to(heddle_root).as_posix() for name in modules if name.startswith(f"{heddle_root}/")}
    named = {path.relative_to(ROOT).as_posix() for name in sources.PYTHON for path in sources.files(ROOT, name)}
    assert len(ran) > 5 and {f"python/heddle/{name}" for name in ran} - named == set()


# Without what is Python's; what a binding includes is every operation.
CPP = {
    name: tuple(path for path in paths if not path.startswith("python/"))
    for name, paths in sources.families().items()
    if name != "host"
}


@pytest.mark.parametrize("family", CPP)
def test_a_row_names_all_that_its_kernel_is_built_from(family):
    assert unnamed(CPP[family], {**EXCEPTIONS, **OF_FAMILY.get(family, {})}) == {}


def test_a_file_that_is_missing_is_found():
    some = tuple(path for path in sources.attention("sm80", backward=True) if path != "src/problem/philox.h")
    assert "src/problem/philox.h" in unnamed(some, EXCEPTIONS)


@pytest.mark.parametrize("path", sorted({*EXCEPTIONS, *(path for some in OF_FAMILY.values() for path in some)}))
def test_an_exception_is_needed(path):
    assert (ROOT / path).exists()
    left_out = [
        {other: why for other, why in (EXCEPTIONS | OF_FAMILY.get(family, {})).items() if other != path}
        for family in CPP
    ]
    assert any(unnamed(paths, exceptions) for paths, exceptions in zip(CPP.values(), left_out))


def test_white_space_alone_ages_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    git = lambda *words: subprocess.run(  # noqa: E731
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    git("init", "-q")
    (tmp_path / "src").mkdir()
    for name in ("formatted.h", "changed.h"):
        (tmp_path / "src" / name).write_text("int x;  // a\n")
    git("add", "-A")
    git("commit", "-qm", "one")
    said = {f"src/{name}": sources.digest(f"src/{name}", tmp_path) for name in ("formatted.h", "changed.h")}
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"commit": git("rev-parse", "HEAD"), "sources": said}))
    (tmp_path / "src" / "formatted.h").write_text("int x; // a\n")
    (tmp_path / "src" / "changed.h").write_text("int y;  // a\n")
    sources.reformat(rows)
    found = json.loads(rows.read_text())["sources"]
    assert found["src/formatted.h"] == sources.digest("src/formatted.h", tmp_path) != said["src/formatted.h"]
    assert found["src/changed.h"] == said["src/changed.h"]
