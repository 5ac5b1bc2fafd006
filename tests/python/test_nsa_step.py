"""What nsa_with_cache takes for a step in one launch is what the operation's candidate takes."""

from dataclasses import replace

import pytest
from heddle import _heddle
from heddle.nsa.sequences import Form
from heddle.nsa.sharing import checked_sharing
from heddle.nsa.step import is_served
from nsa_kit import nsa, torch

STEPS = {
    "standard": {},
    "f16": dict(dtype=torch.float16),
    "f32": dict(dtype=torch.float32),
    "block of 16": dict(block=16),
    "block of 128": dict(block=128),
    "32 blocks": dict(slots=32),
    "33 blocks": dict(slots=33),
    "16 heads": dict(group=16),
    "17 heads": dict(group=17),
    "head of 72": dict(size=72),
    "head of 36": dict(size=36),
    "head of 136": dict(size=136),
    "v's head of 40": dict(v_size=40),
    "v's head of 136": dict(v_size=136),
    "no pooled keys": dict(capacity=50),
}


def call(dtype=torch.bfloat16, block=64, slots=16, group=4, size=64, v_size=None, capacity=300):
    """q, k_new, v_new, the cache and the form."""
    heads, v_size = 2, size if v_size is None else v_size
    cache = nsa.Cache(2, capacity, heads, size, v_size, block=block, dtype=dtype)
    rows = [torch.zeros(2, 1, *x, dtype=dtype) for x in ((heads * group, size), (heads, size), (heads, v_size))]
    return *rows, cache, Form(block, 0.1, checked_sharing("test", 1, "none", (), "own", 100), 100, slots)


@pytest.mark.parametrize("step", STEPS)
def test_the_candidate_says_the_same(step):
    if not _heddle.cuda_built():
        pytest.skip("this build of heddle has no GPU kernels")
    q, k_new, v_new, cache, form = call(**STEPS[step])
    gates = (torch.zeros(q.shape[:3]),) * 3
    held = cache.k, cache.v, cache.k_pooled, cache.v_pooled, cache.lengths, cache.page_table
    out = torch.zeros(*q.shape[:3], v_new.shape[3], dtype=q.dtype)
    try:
        told = _heddle.explain_nsa_step(
            q, k_new, v_new, held, gates, out, form.slots, form.block_size, form.window, 7, form.scale, "h200"
        )
        supported = told[0][2]
    except ValueError as error:  # what no kernel would take
        supported = False
        assert "float16 or bfloat16" in str(error)
    assert is_served(q, k_new, v_new, cache, form, None, 9) == supported
    assert not is_served(q, k_new, v_new, cache, form, None, 8)


@pytest.mark.parametrize("cut", ["cache", "gates"])
def test_a_tuple_that_is_too_short(cut):
    rows = torch.zeros(1, 1, 2, 8)
    cache, gates = (None,) * (5 if cut == "cache" else 6), (None,) * (2 if cut == "gates" else 3)
    with pytest.raises(ValueError, match=f"the {cut} must be a tuple of [36] items"):
        _heddle.explain_nsa_step(rows, rows, rows, cache, gates, rows, 16, 64, 0, 7, None)


def test_other_calls_are_composed():
    q, k_new, v_new, cache, form = call()
    assert is_served(q, k_new, v_new, cache, form, None, 9)
    assert not is_served(q, k_new, v_new, cache, form, torch.ones(2, 1, 2), 9)
    assert not is_served(torch.cat([q, q], 1), k_new, v_new, cache, form, None, 9)
    assert not is_served(q, k_new.float(), v_new, cache, form, None, 9)
    sharing = checked_sharing("test", 2, "output", ("slc",), "own", 100)
    assert not is_served(q, k_new, v_new, cache, replace(form, sharing=sharing), None, 9)
    strided = nsa.Cache(2, 300, 2, 64, block=64, stride=32, dtype=q.dtype)
    assert not is_served(q, k_new, v_new, strided, form, None, 9)
    other = nsa.Cache(2, 300, 2, 64, block=32, dtype=q.dtype)
    assert not is_served(q, k_new, v_new, other, form, None, 9)
    cache.k = torch.zeros(2, 300, 2, 68, dtype=q.dtype)[..., :64]
    assert not is_served(q, k_new, v_new, cache, form, None, 9)
