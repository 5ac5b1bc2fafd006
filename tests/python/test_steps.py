"""Rows and keys that stand for several positions each."""

import re

import heddle
import heddle.nsa
import numpy as np
import pytest
import torch

#: name: options of a call of 40 rows and 60 keys
CASES = {
    "pooled keys": {"causal": "top_left", "key_step": 4, "key_offset": 3},
    "anchors": {"causal": "top_left", "q_step": 3},
    "both": {"causal": "top_left", "q_step": 5, "key_step": 2, "q_offset": 7},
    "window": {"window": (9, 4), "q_step": 3, "key_step": 2},
    "far apart": {"window": (1, 0), "q_step": 7, "key_step": 1},
}


def operands(requires_grad=False):
    make = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(2, n, h, 16, generator=make).requires_grad_(requires_grad) for n, h in ((40, 4), (60, 2), (60, 2))
    )


def mask_of(options):
    rows = options.get("q_offset", 0) + options.get("q_step", 1) * torch.arange(40)[:, None]
    keys = options.get("key_offset", 0) + options.get("key_step", 1) * torch.arange(60)
    left, right = options.get("window", (1 << 20, 1 << 20))
    if options.get("causal") == "top_left":
        right = min(right, 0)
    return (keys >= rows - left) & (keys <= rows + right)


@pytest.mark.parametrize("force", [None, "cpu_baseline", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_mask_that_says_the_same(name, force):
    q, k, v = operands()
    found = heddle.attention(q, k, v, return_lse=True, force=force, **CASES[name])
    expected = heddle.attention(q, k, v, mask=mask_of(CASES[name]), return_lse=True, force=force)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)
    arrays = heddle.attention(*(x.numpy() for x in (q, k, v)), force=force, **CASES[name])
    assert np.array_equal(arrays, found[0].numpy())


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_under_the_mask(name):
    tensors = operands(requires_grad=True)
    w = torch.cos(torch.arange(2 * 40 * 4 * 16)).reshape(2, 40, 4, 16)
    found = torch.autograd.grad((heddle.attention(*tensors, **CASES[name]) * w).sum(), tensors)
    expected = torch.autograd.grad((heddle.attention(*tensors, mask=mask_of(CASES[name])) * w).sum(), tensors)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def test_the_compressed_branch_of_native_sparse_attention():
    block = 16
    make = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 80, h, 24, generator=make) for h in (4, 2, 2))
    ones = torch.ones(2, 80, 4)
    _, expected = heddle.nsa.naive_nsa_compression(q, k, v, ones, 2, block)
    pooled = (x.unflatten(1, (-1, block)).mean(2) for x in (k, v))
    found = heddle.attention(q, *pooled, causal="top_left", key_step=block, key_offset=block - 1)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def test_anchors_are_rows_of_the_whole():
    q, k, v = operands()
    whole = heddle.attention(q, k, v, causal="top_left", window=(20, 0))
    found = heddle.attention(q[:, ::4], k, v, causal="top_left", window=(20, 0), q_step=4)
    torch.testing.assert_close(found, whole[:, ::4], atol=2e-6, rtol=2e-6)


def test_compiled_calls():
    q, k, v = operands()

    def call(q, k, v, step):
        return heddle.attention(q, k, v, causal="top_left", q_step=step, key_step=3)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for step in (1, 2, 5):
        assert torch.equal(compiled(q, k, v, step), call(q, k, v, step))


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"q_step": 0}, ValueError, "_forward] q_step is 0: it must be from 1 to 2147483647"),
        ({"key_step": -3}, ValueError, "_forward] key_step is -3: it must be from 1 to 2147483647"),
        ({"key_step": 2**31}, ValueError, "_forward] key_step is 2147483648: it must be from 1 to 2147483647"),
        ({"q_step": 2**70}, (TypeError, ValueError), f"q_step is {2**70}: it must be an integer of 64 bits"),
        ({"q_step": 1.5}, TypeError, "q_step is 1.5: it must be an integer of 64 bits"),
        ({"key_step": "2"}, TypeError, "key_step is '2': it must be an integer of 64 bits"),
        (
            {"q_step": 2**29}, ValueError,
            "q_offset[0] is 0: with 40 rows 536870912 apart sequence 0 ends at position 20937965569, and positions number",
        ),
        ({"q_step": 2, "causal": "bottom_right"}, ValueError, "causal is bottom_right and q_step is 2: a piece does not know"),
        ({"q_step": 2, "alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes is given and q_step is 2: what is said"),
        ({"key_step": 2, "bias": torch.zeros(60)}, ValueError, "bias is given and key_step is 2: what is said of single"),
        ({"key_step": 2, "mask": torch.ones(60, dtype=torch.bool)}, ValueError, "mask is given and key_step is 2"),
        ({"key_step": 2, "dropout_p": 0.5, "dropout_seed": 1}, ValueError, "dropout is given and key_step is 2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["torch", "numpy", "with gradient"])
def test_refusals(options, error, words, kind):
    tensors = operands(requires_grad=kind == "with gradient")
    if kind == "numpy":
        tensors = [x.numpy() for x in tensors]
        options = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        options |= {name: x.reshape(1, 1, 1, -1) for name, x in options.items() if name in ("bias", "mask")}
    with pytest.raises(error, match=re.escape(words)):
        heddle.attention(*tensors, **options)


def test_explain_knows_steps():
    shape = (2, 70, 4, 24)
    found = heddle.explain(shape, shape, shape, dtype="bfloat16", key_step=16, causal="top_left")
    assert found.chosen.name == "cpu"
    if heddle._heddle.cuda_built():
        there = heddle.explain(shape, shape, shape, dtype="bfloat16", gpu="h100", key_step=16)
        assert there.chosen.name == "sm90"
        elsewhere = (
            c for c in there if not c.supported and not c.name.endswith("_decode")
        )  # these have steps, and few rows
        others = {c.reason for c in elsewhere if "cuda" in c.name or c.name.startswith("sm")}
        assert others == {"it has no q_step and key_step above 1"}


@pytest.mark.skipif(not heddle._heddle.cuda_built(), reason="needs a build with CUDA")
@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        ({}, 128, ""),
        ({"q_step": 5, "window": (4, None)}, 64, ""),
        ({}, 136, "it has no head sizes above 128 beside q_offset and key_offset; found 136 and 136"),
        ({"softcap": 5.0}, 64, "it has no softcap, ALiBi, bias and mask beside q_offset and key_offset"),
        ({"scale": -1.0}, 64, "scale must be positive beside q_offset and key_offset; found -1"),
        ({"q_step": 6, "window": (4, 0)}, 64, "it has no rows that stand farther apart than the window is wide"),
        (
            {"window": (2**28 + 1, None)}, 64,
            "sequences and windows must be no longer than 268435456 positions beside q_offset and key_offset",
        ),
    ],
)  # fmt: skip
def test_what_hoppers_forward_takes(options, size, words):
    q, k = (1, 4096, 16, size), (1, 256, 1, size)
    found = heddle.explain(q, k, k, dtype="bfloat16", gpu="h100", key_step=16, key_offset=15, **options)
    assert next(c.reason for c in found if c.name == "sm90") == words
    assert (found.chosen is not None and found.chosen.name == "sm90") == (words == "")
