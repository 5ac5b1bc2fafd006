"""What is refused because it would be wrong without a word: tensors that are not their memory's values, flags that are none."""

import heddle
import numpy as np
import pytest
import torch
from heddle import flash_attn
from heddle._options import pack
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
        heddle.attention_with_kv_cache(
            q, k, v, *(x.to(device) for x in cache_of(k, v)), LENGTHS.to(device), **{name: bias}
        )
    with pytest.raises(TypeError, match=words):
        heddle.Int4Cache.empty(2, 300, 4, 64, device=device).attention(q, LENGTHS.to(device), **{name: bias})


def test_causal_biases_past_the_front():
    """Operators, arrays of numpy and explain() read memory too."""
    q, k, v = tensors()
    words = "bias is a CausalBias, whose memory holds no values"
    bias = causal_upper_left(5, 5)
    options = pack(bias=bias)
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


def flagged():
    """name: (a call with one flag, the operation and the flag that an error names, whether None is a value)."""
    q, k, v = tensors()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    kv, qkv = torch.stack([k, v], 2), torch.stack([q, k, v], 2)
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    table = torch.ones(16, 4)
    cache = heddle.Int4Cache.empty(2, 300, 4, 64)
    wide = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)
    zero = torch.zeros(2, dtype=torch.int32)

    blocks = torch.zeros(2, 5, 1, 1, dtype=torch.int32)

    def cached(**options):
        return heddle.attention_with_kv_cache(
            q, k, v, *cache_of(k, v), LENGTHS, rotary_cos=table, rotary_sin=table, **options
        )

    def varlen(**options):
        return flash_attn.flash_attn_varlen_func(*flat, cu, cu, 5, 5, **options)

    calls = {
        "attention": (lambda **x: heddle.attention(q, k, v, **x), "return_lse batch_invariant deterministic"),
        "numpy": (lambda **x: heddle.attention(*(t.numpy() for t in (q, k, v)), **x), "return_lse batch_invariant"),
        "explain": (lambda **x: heddle.explain(q, k, v, **x), "batch_invariant deterministic"),
        "sparse_attention": (
            lambda **x: heddle.sparse_attention(q, k, v, blocks, **x),
            "return_lse batch_invariant deterministic",
        ),
        "explain_sparse_attention": (
            lambda **x: heddle.explain_sparse_attention(q, k, v, blocks, **x),
            "batch_invariant deterministic",
        ),
        "sdpa": (lambda **x: heddle.sdpa(*heads_first, **x), "is_causal enable_gqa"),
        "apply_rotary": (lambda **x: heddle.apply_rotary(q, table, table, **x), "interleaved"),
        "append_kv_cache": (lambda **x: heddle.append_kv_cache(k, v, *cache_of(k, v), LENGTHS, **x), "interleaved"),
        "attention_with_kv_cache": (cached, "interleaved return_lse batch_invariant"),
        "append_int4_cache": (lambda **x: cache.append(wide, wide, zero, **x), "interleaved"),
        "attention_over_int4_cache": (lambda **x: cache.attention(wide, zero, **x), "return_lse"),
        "func": (lambda **x: flash_attn.flash_attn_func(q, k, v, **x), "causal deterministic return_attn_probs"),
        "kvpacked": (
            lambda **x: flash_attn.flash_attn_kvpacked_func(q, kv, **x),
            "causal deterministic return_attn_probs",
        ),
        "qkvpacked": (
            lambda **x: flash_attn.flash_attn_qkvpacked_func(qkv, **x),
            "causal deterministic return_attn_probs",
        ),
        "varlen": (varlen, "causal deterministic return_attn_probs"),
        "varlen_kvpacked": (
            lambda **x: flash_attn.flash_attn_varlen_kvpacked_func(flat[0], kv.flatten(0, 1), cu, cu, 5, 5, **x),
            "causal deterministic return_attn_probs",
        ),
        "varlen_qkvpacked": (
            lambda **x: flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 5, **x),
            "causal deterministic return_attn_probs",
        ),
        "flash_attn_with_kvcache": (
            lambda **x: flash_attn.flash_attn_with_kvcache(q, *cache_of(k, v), k, v, table, table, LENGTHS, **x),
            "causal rotary_interleaved return_softmax_lse",
        ),
    }
    for name, (call, flags) in calls.items():
        for flag in flags.split():
            yield pytest.param(call, flag, id=f"{name}-{flag}")


def same(a, b):
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a == b if not isinstance(a, np.ndarray) else np.array_equal(a, b)


@pytest.mark.parametrize("call, flag", list(flagged()))
def test_flags_are_bools(call, flag):
    """Python takes any text for true, "none" and "False" too."""
    refused = {"'none'": "none", "''": "", "2": 2, "1.0": 1.0, "a Tensor": torch.tensor(True), "a list": []}
    for shown, value in refused.items():
        with pytest.raises(TypeError, match=rf"\[\w+\] {flag} is {shown}: it must be True or False"):
            call(**{flag: value})
    if flag != "deterministic" or call.__code__.co_names[0] == "flash_attn":
        with pytest.raises(TypeError, match=rf"{flag} is None: it must be True or False"):
            call(**{flag: None})
    for value in (False, True):
        expected = call(**{flag: value})
        for other in (np.bool_(value), int(value)):
            assert same(call(**{flag: other}), expected)


def test_flags_of_symbolic_sizes():
    """As Transformers' models write it; the comparison of a symbolic size is no bool while torch traces."""

    def step(q, k, v):
        return heddle.sdpa(q, k, v, is_causal=q.shape[2] > 1)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (7, 5, 1):
        inputs = [torch.randn(2, 4, n, 8) for n in (rows, 9, 9)]
        torch.testing.assert_close(compiled(*inputs), step(*inputs))
    traced = torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode="symbolic")(*inputs)
    torch.testing.assert_close(traced(*inputs), step(*inputs))
