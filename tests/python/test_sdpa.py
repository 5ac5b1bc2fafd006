"""heddle.sdpa against torch.nn.functional.scaled_dot_product_attention."""

import heddle
import pytest
import torch
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
