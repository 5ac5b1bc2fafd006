"""heddle.sdpa against torch.nn.functional.scaled_dot_product_attention."""

import heddle
import pytest
import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

SHAPES = {
    "four dimensions": ((2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 24)),
    "three dimensions": ((4, 9, 16), (4, 13, 16), (4, 13, 16)),
    "two dimensions": ((9, 16), (13, 16), (13, 8)),
    "five dimensions": ((2, 3, 4, 9, 16), (2, 3, 4, 13, 16), (2, 3, 4, 13, 16)),
    "broadcast batch": ((2, 4, 9, 16), (1, 4, 13, 16), (1, 4, 13, 16)),
    "broadcast heads": ((2, 4, 9, 16), (2, 1, 13, 16), (2, 1, 13, 16)),
}


def compare(inputs, tolerance=2e-6, **options):
    """Output and gradients of both, on the same inputs (and a float attn_mask)."""
    results = []
    mask = options.pop("attn_mask", None)
    for function, dtype in ((heddle.sdpa, None), (scaled_dot_product_attention, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
        given = mask
        if mask is not None and mask.dtype != torch.bool:
            given = mask.detach().to(dtype or mask.dtype).requires_grad_()
            leaves.append(given)
        out = function(*leaves[:3], attn_mask=given, **options)
        torch.manual_seed(3)
        results.append([out, *torch.autograd.grad((out * torch.randn(out.shape).to(out.dtype)).sum(), leaves)])
    for found, expected in zip(*results):
        assert found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, atol=tolerance * 10, rtol=tolerance * 10)


def draw(name):
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES[name]]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    inputs = draw(name)
    compare(inputs)
    compare(inputs, is_causal=True, scale=0.4)
    compare(inputs, attn_mask=torch.rand(9, 13) > 0.4)


@pytest.mark.parametrize("shape", [(9, 13), (1, 13), (4, 9, 13), (2, 1, 9, 13), (2, 4, 9, 13), (1, 4, 1, 1)])
def test_masks_broadcast(shape):
    inputs = draw("four dimensions")
    compare(inputs, attn_mask=torch.randn(shape))
    keep = torch.rand(shape) > 0.5
    keep[..., :2, :] = keep[..., :2, :] & (shape[-2] == 1)  # rows that are masked fully
    compare(inputs, attn_mask=keep)


def test_masks_of_five_dimensions():
    inputs = draw("five dimensions")
    compare(inputs, attn_mask=torch.randn(2, 1, 1, 9, 13))
    compare(inputs, attn_mask=torch.randn(1, 1, 4, 9, 13))


def test_rows_masked_by_infinity_give_zero():
    inputs = draw("four dimensions")
    mask = torch.randn(9, 13)
    mask[3] = -torch.inf
    out = heddle.sdpa(*inputs, attn_mask=mask)
    assert torch.equal(out[:, :, 3], torch.zeros(2, 4, 24)) and torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_lowest_number_are_means(dtype):
    """As transformers writes masks: where no key is left, all are the same, and what is left is the mean of the values."""
    q, k, v = (x.to(dtype) for x in draw("four dimensions"))
    mask = torch.randn(9, 13).to(dtype)
    mask[3], mask[5, 1:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    mask[7], mask[7, 4] = torch.finfo(dtype).min, torch.finfo(dtype).max
    out = heddle.sdpa(q, k, v, attn_mask=mask)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out, scaled_dot_product_attention(q, k, v, attn_mask=mask), atol=tolerance, rtol=tolerance
    )
    mean = v.float().mean(2).to(dtype)
    torch.testing.assert_close(out[:, :, 3], mean, atol=tolerance, rtol=tolerance)
    for row, key in ((5, 0), (7, 4)):
        assert torch.equal(out[:, :, row], v[:, :, key])
    if dtype == torch.float32:
        compare((q, k, v), attn_mask=mask)


def test_grouped_heads():
    torch.manual_seed(1)
    inputs = [torch.randn(2, 6, 9, 16), torch.randn(2, 2, 13, 16), torch.randn(2, 2, 13, 16)]
    compare(inputs, enable_gqa=True, is_causal=True)
    with pytest.raises(ValueError, match="key has 2 heads and query has 6: pass enable_gqa=True"):
        heddle.sdpa(*inputs)


def test_dropout_and_refusals():
    q, k, v = draw("four dimensions")
    torch.manual_seed(0)
    once = heddle.sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(once, heddle.sdpa(q, k, v, dropout_p=0.5))
    assert not torch.equal(once, heddle.sdpa(q, k, v, dropout_p=0.5))
    with pytest.raises(ValueError, match="is_causal and attn_mask exclude each other"):
        heddle.sdpa(q, k, v, attn_mask=torch.ones(9, 13, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="query has 1 dimensions"):
        heddle.sdpa(q[0, 0, 0], k, v)
    with pytest.raises(TypeError, match="query is a ndarray"):
        heddle.sdpa(q.numpy(), k, v)


BIASES = {"upper left": causal_upper_left, "lower right": causal_lower_right}


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("rows", [1, 9, 13, 20])
@pytest.mark.parametrize("corner", BIASES)
def test_causal_biases(corner, rows):
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 4, rows, 16), torch.randn(2, 4, 13, 16), torch.randn(2, 4, 13, 24)
    bias = BIASES[corner](rows, 13)
    results = []
    for function, dtype in ((heddle.sdpa, torch.float32), (scaled_dot_product_attention, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*leaves, attn_mask=bias, scale=0.3)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for found, expected in zip(*results):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)
    if corner == "lower right" and rows > 13:  # the first rows meet no key
        assert torch.equal(results[0][0][:, :, : rows - 13], torch.zeros(2, 4, rows - 13, 24))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("corner, words", [("upper left", "top_left"), ("lower right", "bottom_right")])
def test_causal_biases_of_other_shapes_and_ways(corner, words):
    make = BIASES[corner]
    five = draw("five dimensions")
    torch.testing.assert_close(
        heddle.sdpa(*five, make(9, 13)), scaled_dot_product_attention(*five, attn_mask=make(9, 13)._materialize())
    )
    grouped = [torch.randn(2, 6, 9, 16), torch.randn(2, 2, 13, 16), torch.randn(2, 2, 13, 16)]
    found = heddle.sdpa(*grouped, attn_mask=make(9, 13), enable_gqa=True)
    rows_first = (x.transpose(1, 2) for x in grouped)
    assert torch.equal(found.transpose(1, 2), heddle.attention(*rows_first, causal=words))
    q, k, v = draw("four dimensions")
    expected = heddle.sdpa(q, k, v, make(9, 13))
    step = torch.compile(heddle.sdpa, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(q, k, v, make(9, 13)), expected)
    mapped = torch.func.vmap(lambda x: heddle.sdpa(x, k, v, make(9, 13)))(torch.stack([q, q]))
    torch.testing.assert_close(mapped[1], expected)
    torch.manual_seed(0)
    dropped = heddle.sdpa(q, k, v, make(9, 13), 0.5)
    torch.manual_seed(0)
    rows_first = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(dropped.transpose(1, 2), heddle.attention(*rows_first, causal=words, dropout_p=0.5))
    assert heddle.sdpa(*(x.to("meta") for x in (q, k, v)), make(9, 13)).shape == expected.shape


def test_causal_biases_that_do_not_fit():
    q, k, v = draw("four dimensions")
    with pytest.raises(ValueError, match="is_causal and attn_mask exclude each other"):
        heddle.sdpa(q, k, v, attn_mask=causal_upper_left(9, 13), is_causal=True)
    for make in BIASES.values():
        with pytest.raises(
            ValueError, match=r"\[sdpa\] attn_mask is a CausalBias of \[7, 13\] and .* lengths \[9, 13\]"
        ):
            heddle.sdpa(q, k, v, attn_mask=make(7, 13))
    moved = causal_upper_left(9, 13).clone()
    assert type(moved) is CausalBias
    with pytest.raises(TypeError, match="attn_mask is a CausalBias that has lost its variant"):
        heddle.sdpa(q, k, v, attn_mask=moved)
