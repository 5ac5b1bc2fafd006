"""explain() for a GPU that need not be here, and docs/support.md's table, which is written from it."""

import shutil
import subprocess
import sys
from pathlib import Path

import heddle
import numpy as np
import pytest
import torch
from heddle import lowbit

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON"
needs_kernels = pytest.mark.skipif(not heddle._heddle.cuda_built(), reason="a build without CUDA has no kernels to ask")
SHAPES = ((2, 1024, 8, 128), (2, 1024, 2, 128), (2, 1024, 2, 128))


def chosen(gpu, *shapes, dtype="bfloat16", **options):
    found = heddle.explain(*(shapes or SHAPES), dtype=dtype, gpu=gpu, **options).chosen
    return found and found.name


@pytest.mark.skipif(heddle._heddle.cuda_built(), reason="this build has kernels")
def test_without_kernels_candidates_say_so():
    found = {c.name: c.reason for c in heddle.explain(*SHAPES, gpu="h100")}
    assert found["sm90"] == found["sm80"] == WITHOUT and chosen("h100") is None


@needs_kernels
def test_architectures_have_their_own_kernels():
    one = ((1, 1, 8, 128), (1, 8192, 2, 128), (1, 8192, 2, 128))
    for gpu, prefix in [("a100", "sm80"), ("rtx4090", "sm80"), ("l40s", "sm80"), ("h100", "sm90"), ("h200", "sm90")]:
        assert chosen(gpu) == chosen(gpu, backward=True) == prefix
        assert chosen(gpu, *one) == f"{prefix}_decode"
    assert chosen("h100", dtype="float32") == "sm80" and chosen("a100", precision="int8_qk") == "sm80_int8"
    reasons = {c.name: c.reason for c in heddle.explain(*SHAPES, gpu="rtx4090")}
    assert reasons["sm90"] == "it needs a Hopper GPU (compute capability 9.0); this one has 8.9"
    assert reasons["cpu"] == "it runs on another device than the tensors are on"


@needs_kernels
def test_tensors_may_be_anywhere_and_stay_what_they_are():
    narrow = torch.empty(2, 64, 4, 64, dtype=torch.float8_e4m3fn)
    assert chosen("h100", narrow, narrow, narrow) == "sm90_fp8" and chosen("a100", narrow, narrow, narrow) is None
    q = np.zeros((2, 64, 4, 64), np.float16)
    mask, slopes = torch.ones(2, 1, 64, 64, dtype=torch.bool), np.ones(4, np.float32)
    assert chosen("h100", q, q, q, mask=mask, alibi_slopes=slopes) == "sm90"
    # Of index data nothing is read: such a table would be refused on the CPU.
    pages, used = np.full((2, 4), 99, np.int32), np.full(2, 64, np.int32)
    keys = np.zeros((8, 16, 4, 64), np.float16)
    assert chosen("h100", q[:, :1], keys, keys, page_table=pages, seqused_k=used) == "sm90_decode"
    with pytest.raises(ValueError, match="page"):
        heddle.explain(q[:, :1], keys, keys, page_table=pages, seqused_k=used)
    cu = np.array([0, 64], np.int32)
    with pytest.raises(ValueError, match="max_seqlen_q is 0: cu_seqlens_q is on a GPU"):
        chosen("h100", q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert (
        chosen("h100", q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=64, max_seqlen_k=64) == "sm90"
    )


def test_the_next_call_is_about_what_is_here():
    before = heddle.explain(*SHAPES)
    heddle.explain(*SHAPES, gpu="h100")
    assert heddle.explain(*SHAPES) == heddle.explain(*SHAPES, gpu=None) == before
    with pytest.raises(ValueError, match="heads"):
        heddle.explain(SHAPES[0], (2, 8, 3, 128), (2, 8, 3, 128), gpu="h100")
    assert heddle.explain(*SHAPES) == before
    q = np.ones((1, 4, 2, 8), np.float32)
    np.testing.assert_array_equal(heddle.attention(q, q, q), q)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [("v100", "gpu is 'v100': it must be one of a100, rtx4090, l40s, h100, h200"), ("", "gpu is ''"), (0, "gpu is 0"),
     (("h100",), r"gpu is \('h100',\): it must be a name")],
)  # fmt: skip
def test_other_names_are_refused(gpu, words):
    packed = lowbit.pack(lowbit.quantize(np.ones((32, 64), np.float32), "nvfp4"))
    with pytest.raises(ValueError, match=rf"\[explain\] {words}"):
        heddle.explain(*SHAPES, gpu=gpu)
    with pytest.raises(ValueError, match=rf"\[explain\] {words}"):
        lowbit.explain(np.ones((3, 64), np.float32), packed, gpu=gpu)


@needs_kernels
def test_linear_layers():
    weights = torch.ones(512, 1024)
    packed = lowbit.pack(lowbit.quantize(weights, "nvfp4"))

    def named(gpu, rows, matrix=packed, **options):
        found = lowbit.explain(torch.empty(rows, 1024, dtype=torch.bfloat16), matrix, gpu=gpu, **options)
        return next((c.name for c in found if c.chosen), None)

    assert (
        named("h100", 64) == "sm90_w4a16" and named("a100", 64) == "sm80_linear" and named("rtx4090", 1) == "sm80_gemv"
    )
    assert named("a100", 64, activation="silu", norm="rms_norm") == "sm80_linear"
    assert named("a100", 4096, lowbit.pack(lowbit.quantize(weights, "int4_g128"))) == "cublaslt"
    assert named(None, 64) == "cpu"


# ----------------------------------------------------------------------------------------------------------- the table


@pytest.fixture
def tree(tmp_path):
    """A copy of what scripts/support_table.py reads."""
    for folder in ("scripts", "src/cpu/targets"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/support.md", tmp_path / "docs")
    return tmp_path


def support_table(tree, *more):
    return subprocess.run([sys.executable, tree / "scripts/support_table.py", *more], capture_output=True, text=True)


@needs_kernels
def test_a_row_changed_by_hand_is_seen(tree):
    page = tree / "docs/support.md"
    good = page.read_text()
    begin, row = good.index("<!-- begin support gpu -->"), "| float16; bfloat16 | yes |"
    assert row in good[begin:]
    page.write_text(good[:begin] + good[begin:].replace(row, row.replace("yes |", "no |")))
    failed = support_table(tree, "--check")
    assert failed.returncode == 1 and "run scripts/support_table.py" in failed.stderr
    assert support_table(tree).returncode == 0 and page.read_text() == good


@pytest.mark.skipif(heddle._heddle.cuda_built(), reason="this build has kernels")
def test_without_kernels_there_is_no_table(tree):
    failed = support_table(tree, "--check")
    assert failed.returncode == 1 and "built without CUDA" in failed.stderr
