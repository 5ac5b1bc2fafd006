"""heddle.sdpa against torch's own for shapes that broadcast, have few dimensions or no elements, and for numbers at the
edge."""

import itertools

import heddle
import pytest
import torch
from test_sdpa import compare
from torch.nn.functional import scaled_dot_product_attention


def draw(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


BROADCAST = {
    "one head of query": ((2, 1, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16)),
    "one head of key": ((2, 4, 9, 16), (2, 1, 13, 16), (2, 4, 13, 16)),
    "one head of value": ((2, 4, 9, 16), (2, 4, 13, 16), (2, 1, 13, 24)),
    "one head of query and value": ((2, 1, 9, 16), (2, 4, 13, 16), (2, 1, 13, 16)),
    "batch of query": ((1, 4, 9, 16), (3, 4, 13, 16), (3, 4, 13, 16)),
    "batch of value": ((2, 4, 9, 16), (2, 4, 13, 16), (1, 4, 13, 16)),
    "query without batch": ((4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16)),
    "key and value without batch": ((2, 4, 9, 16), (4, 13, 16), (4, 13, 16)),
    "key and value of two dimensions": ((2, 4, 9, 16), (13, 16), (13, 16)),
    "query of two dimensions": ((9, 16), (4, 13, 16), (4, 13, 16)),
    "value alone of three dimensions": ((9, 16), (13, 16), (4, 13, 8)),
    "five dimensions": ((2, 1, 4, 9, 16), (3, 1, 13, 16), (2, 3, 1, 13, 16)),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_what_broadcasts(name):
    inputs = draw(*BROADCAST[name])
    compare(inputs)
    compare(inputs, is_causal=True, scale=0.4)
    compare(inputs, attn_mask=torch.randn(9, 13))


GROUPS = {
    "three dimensions": ((8, 9, 16), (2, 13, 16), (2, 13, 16)),
    "other groups of value": ((2, 12, 9, 16), (2, 2, 13, 16), (2, 3, 13, 16)),
    "one key head": ((2, 8, 9, 16), (2, 1, 13, 16), (2, 4, 13, 16)),
    "batch of key and value": ((3, 8, 9, 16), (1, 2, 13, 16), (1, 2, 13, 16)),
    "five dimensions": ((2, 3, 8, 9, 16), (2, 3, 2, 13, 16), (2, 3, 2, 13, 16)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_grouped_heads(name):
    compare(draw(*GROUPS[name]), enable_gqa=True)
    compare(draw(*GROUPS[name]), enable_gqa=True, attn_mask=torch.rand(9, 13) > 0.3)


MASKS = {
    (4, 9, 16): [(), (13,), (9, 1), (9, 13), (1, 9, 13), (4, 1, 13)],
    (9, 16): [(), (13,), (1, 13), (9, 13)],
    (2, 3, 4, 9, 16): [(9, 13), (4, 9, 13), (3, 4, 9, 13), (3, 1, 9, 13), (1, 1, 9, 13), (2, 1, 1, 1, 13)],
}


@pytest.mark.parametrize("shape, mask", [(s, m) for s, masks in MASKS.items() for m in masks])
def test_masks_of_fewer_dimensions(shape, mask):
    inputs = draw(shape, (*shape[:-2], 13, 16), (*shape[:-2], 13, 16))
    compare(inputs, attn_mask=torch.randn(mask))
    compare(inputs, attn_mask=torch.rand(mask) > (0.3 if len(mask) > 1 else -1))


EMPTY = {
    "no sequences": ((0, 4, 9, 16), (0, 4, 13, 16), (0, 4, 13, 16)),
    "no sequences, broadcast": ((0, 4, 9, 16), (1, 4, 13, 16), (1, 4, 13, 16)),
    "no heads": ((2, 0, 9, 16), (2, 0, 13, 16), (2, 0, 13, 16)),
    "no queries": ((2, 4, 0, 16), (2, 4, 13, 16), (2, 4, 13, 16)),
    "no keys": ((2, 4, 9, 16), (2, 4, 0, 16), (2, 4, 0, 16)),
    "no values": ((2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 0)),
    "no columns": ((2, 4, 9, 0), (2, 4, 13, 0), (2, 4, 13, 16)),
    "nothing at all": ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    "all alike, no sequences": ((0, 4, 9, 16),) * 3,
    "all alike, no heads": ((2, 0, 9, 16),) * 3,
    "all alike, no rows": ((2, 4, 0, 16),) * 3,
    "all alike, no columns": ((2, 4, 9, 0),) * 3,
    "five dimensions": ((2, 0, 4, 9, 16), (2, 0, 4, 13, 16), (2, 0, 4, 13, 16)),
    "three dimensions": ((0, 9, 16), (0, 13, 16), (0, 13, 16)),
    "two dimensions": ((0, 16), (13, 16), (13, 16)),
}


@pytest.mark.filterwarnings("ignore:.*zero")
@pytest.mark.parametrize("name", EMPTY)
def test_nothing(name):
    inputs = draw(*EMPTY[name])
    compare(inputs)
    compare(inputs, is_causal=True)
    compare(inputs, attn_mask=torch.ones(inputs[0].shape[-2], inputs[1].shape[-2], dtype=torch.bool))
    # Gradients of an empty result are zeros, and are there.
    leaves = [x.requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(heddle.sdpa(*leaves).sum(), leaves)
    assert all(g.shape == x.shape and g.isfinite().all() for g, x in zip(gradients, leaves))


def test_scales():
    inputs = draw((2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16))
    for scale in (None, 0.0, -0.5, 1, 2.0):
        compare(inputs, scale=scale)


@pytest.mark.parametrize(
    "options", [dict(attn_mask=(1, 2, 4, 9, 13)), dict(attn_mask=(2, 4, 9, 13)), dict(attn_mask=(9, 12))]
)
def test_masks_that_torch_refuses(options):
    inputs = draw(*[(1, 4, n, 16) for n in (9, 13, 13)])
    mask = torch.randn(options["attn_mask"])
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(*inputs, attn_mask=mask)
    words = r"attn_mask is \[.*\]: it must be broadcastable to \[..., H, L, S\] = \[1, 4, 9, 13\]"
    with pytest.raises(ValueError, match=words):
        heddle.sdpa(*inputs, attn_mask=mask)


def test_refusals_say_query_key_and_value():
    q, k, v = draw((2, 6, 9, 16), (2, 6, 13, 16), (2, 6, 13, 16))
    some = (slice(None), slice(0, 4))
    for call, message in (
        (
            lambda: heddle.sdpa(q, k[..., :8], v),
            r"key has head size 8 and query has 16: .*found query \[2, 6, 9, 16\], key \[",
        ),
        (lambda: heddle.sdpa(q, k, v[:, :, :12]), "value has length 12 and key has 13: they must be equal"),
        (lambda: heddle.sdpa(q, k[some], v[some]), "key has 4 heads and query has 6: pass enable_gqa=True"),
        (lambda: heddle.sdpa(q, k, v[some]), "value has 4 heads and query has 6: pass enable_gqa=True"),
        (
            lambda: heddle.sdpa(q, k, v[some], enable_gqa=True),
            "value has 4 heads and query has 6: with enable_gqa query's must",
        ),
        (
            lambda: heddle.sdpa(q[:, :1], k[:, :2], v[:, :2], enable_gqa=True),
            "key has 2 heads and query has 1: with enable_gqa",
        ),
        (
            lambda: heddle.sdpa(torch.cat([q, q[:1]]), k, v),
            "leading dimensions of query, key and value do not broadcast",
        ),
        (
            lambda: heddle.sdpa(q, k, v, torch.zeros(9, 13, dtype=torch.float64)),
            "attn_mask is torch.float64: it must be torch.bool",
        ),
        (
            lambda: heddle.sdpa(q, k, v, torch.zeros(9, 13, dtype=torch.bfloat16)),
            "attn_mask is torch.bfloat16: it must be",
        ),
    ):
        with pytest.raises(ValueError, match=r"\[sdpa\] " + message):
            call()
    with pytest.raises(TypeError, match=r"\[sdpa\] value is None: it must be a torch tensor"):
        heddle.sdpa(q, k, None)


@pytest.mark.parametrize("p", [1, 1.0, -0.1, 2.0, float("nan")])
def test_dropout_is_a_probability_below_one(p):
    for shape in ((2, 4, 9, 16), (9, 16)):
        q = torch.randn(shape)
        with pytest.raises(ValueError, match=r"dropout_p is .*: it must be in \[0, 1\)"):
            heddle.sdpa(q, q, q, dropout_p=p)


def test_symbolic_shapes():
    step = torch.compile(heddle.sdpa, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, rows in itertools.product((2, 3), (5, 7)):
        inputs = [torch.randn(1, 1, rows, 8), torch.randn(batch, 4, 9, 8), torch.randn(batch, 4, 9, 8)]
        torch.testing.assert_close(step(*inputs), heddle.sdpa(*inputs))
