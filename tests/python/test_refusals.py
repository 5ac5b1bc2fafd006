"""What is refused because it would be wrong without a word: tensors that are not their memory's values."""

import heddle
import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor


def tensors(S=5, H=4, D=8):
    torch.manual_seed(0)
    return [torch.randn(2, S, H, D) for _ in "qkv"]


def cache_of(k, v, slots=12):
    return [torch.zeros(2, slots, *x.shape[2:]) for x in (k, v)]


LENGTHS = torch.tensor([1, 2], dtype=torch.int32)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("bias", [causal_upper_left(5, 5), causal_lower_right(5, 5)])
def test_causal_biases_are_no_biases(bias, name, device):
    """torch's CausalBias says in attributes what it means, and its memory was never written."""
    q, k, v = (x.to(device) for x in tensors())
    words = rf"{name} is a CausalBias, whose memory holds no values: say causal='top_left' for causal_upper_left or causal='bo"
    with pytest.raises(TypeError, match=words):
        heddle.attention(q, k, v, **{name: bias})
    with pytest.raises(TypeError, match=words):
        heddle.attention_with_kv_cache(q, k, v, *(x.to(device) for x in cache_of(k, v)), LENGTHS.to(device), **{name: bias})
    with pytest.raises(TypeError, match=words):
        heddle.Int4Cache.empty(2, 300, 4, 64, device=device).attention(q, LENGTHS.to(device), **{name: bias})


def test_causal_biases_past_the_front():
    """Operators, arrays of numpy and explain() read memory too."""
    q, k, v = tensors()
    words = "bias is a CausalBias, whose memory holds no values"
    bias = causal_upper_left(5, 5)
    options = (None, bias, *[None] * 13, None, 0, -1, -1, 0.0, 0.0, None, 0, 0, False, False, 0, "", "")
    with pytest.raises(ValueError, match=words):
        torch.ops.heddle.attention_forward(q, k, v, *options)
    with pytest.raises(ValueError, match=words):
        heddle.attention(*(x.numpy() for x in (q, k, v)), bias=bias)
    with pytest.raises(ValueError, match=words):
        heddle.explain(q, k, v, bias=bias)


def test_masked_arrays():
    """Their buffer is the data alone."""
    q, k, v = (x.numpy() for x in tensors())
    masked = np.ma.masked_array(np.zeros((5, 5), np.float32), mask=np.eye(5, dtype=bool))
    with pytest.raises(ValueError, match=r"\[attention_forward\] bias is a MaskedArray, whose mask would not be read"):
        heddle.attention(q, k, v, bias=masked)
    with pytest.raises(ValueError, match=r"\[attention_forward\] q is a MaskedArray"):
        heddle.attention(np.ma.masked_array(q), k, v)


def others():
    rows = [torch.randn(3, 5), torch.randn(2, 5)]
    return {
        "NestedTensor of nested": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "Tensor of nested": torch.nested.nested_tensor(rows),
        "Tensor of layout torch.sparse_coo": torch.eye(5).to_sparse(),
        "MaskedTensor, a type that does not take": torch.masked.masked_tensor(torch.ones(5, 5), torch.eye(5) > 0),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*MaskedTensor")
def test_other_kinds_of_tensors_are_named():
    q, k, v = tensors()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    for kind, x in others().items():
        with pytest.raises(TypeError, match=rf"\[attention\] bias is a {kind}"):
            heddle.attention(q, k, v, bias=x)
        with pytest.raises(TypeError, match=rf"(attn_mask|bias) is a {kind}"):
            heddle.sdpa(*heads_first, attn_mask=x)
        with pytest.raises(TypeError, match=rf"\[attention\] q is a {kind}"):
            heddle.attention(x, k, v)
    for kind, x in list(others().items())[:3]:
        with pytest.raises(TypeError, match=rf"\[sdpa\] query is a {kind}"):
            heddle.sdpa(x, x, x)
        with pytest.raises(TypeError, match=rf"\[sdpa\] key is a {kind}"):
            heddle.sdpa(heads_first[0], x, heads_first[2])

    class BlockMask:
        pass

    with pytest.raises(TypeError, match=r"\[sdpa\] attn_mask is a BlockMask: it must be a torch tensor"):
        heddle.sdpa(*heads_first, attn_mask=BlockMask())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_subclasses_over_their_own_memory_are_served():
    class Tagged(torch.Tensor):
        pass

    q, k, v = tensors()
    bias = torch.randn(5, 5)
    expected = heddle.attention(q, k, v, bias=bias)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    for x in (torch.nn.Parameter(bias), bias.as_subclass(Tagged), torch.nn.Parameter(bias.as_subclass(Tagged))):
        assert torch.equal(heddle.attention(q, k, v, bias=x), expected)
        assert torch.equal(heddle.sdpa(*heads_first, attn_mask=x).transpose(1, 2), expected)
    two = heddle.attention(q, k, v, bias=TwoTensor(bias, bias + torch.eye(5)))
    assert torch.equal(two.a, expected) and not torch.equal(two.b, expected)
    mapped = torch.func.vmap(lambda x: heddle.attention(q, k, v, bias=x))(torch.stack([bias, bias]))
    torch.testing.assert_close(mapped[1], expected)
