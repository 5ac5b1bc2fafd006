"""Pieces of a call, with positions of their own and results in float32, and what joins them."""

import re

import heddle
import numpy as np
import pytest
import torch
from kit import OnlyDLPack
from partial_kit import OPTIONS, merged, operands, parts, plain_merge


@pytest.mark.parametrize("rows", [(0, 70), (13, 41)])
@pytest.mark.parametrize("name", OPTIONS)
def test_pieces_are_the_call(name, rows):
    q, k, v, sink = operands()
    out, lse = merged(q, k, v, sink, OPTIONS[name], rows)
    whole, whole_lse = heddle.attention(q, k, v, sink=sink, return_lse=True, **OPTIONS[name])
    torch.testing.assert_close(out, whole[:, rows[0] : rows[1]], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, whole_lse[..., rows[0] : rows[1]], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_through_pieces_are_the_calls(name):
    tensors = operands(requires_grad=True)
    out, lse = merged(*tensors, OPTIONS[name])
    q, k, v, sink = tensors
    whole, whole_lse = heddle.attention(q, k, v, sink=sink, return_lse=True, **OPTIONS[name])
    w, u = (
        torch.cos(torch.arange(out.numel())).reshape(out.shape),
        torch.sin(torch.arange(lse.numel())).reshape(lse.shape),
    )
    found = torch.autograd.grad((out * w).sum() + (lse * u).sum(), tensors)
    expected = torch.autograd.grad((whole * w).sum() + (whole_lse * u).sum(), tensors)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def test_a_bias_of_pieces_has_the_gradient_of_the_whole():
    q, k, v, _ = operands()
    bias = OPTIONS["bias"]["bias"].clone().requires_grad_()
    w = torch.cos(torch.arange(q.numel())).reshape(q.shape)
    (found,) = torch.autograd.grad((merged(q, k, v, None, {"bias": bias})[0] * w).sum(), bias)
    (expected,) = torch.autograd.grad((heddle.attention(q, k, v, bias=bias) * w).sum(), bias)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)


def test_offsets_of_each_sequence():
    q, k, v, _ = operands()
    at = torch.tensor([40, 11], dtype=torch.int32)
    out = heddle.attention(q[:, :7], k, v, causal="top_left", q_offset=at)
    for b in range(2):
        seen = int(at[b])
        alone = heddle.attention(q[b : b + 1, :7], k[b : b + 1], v[b : b + 1], causal="top_left", q_offset=seen)
        mask = torch.arange(70) <= seen + torch.arange(7)[:, None]
        torch.testing.assert_close(alone, heddle.attention(q[b : b + 1, :7], k[b : b + 1], v[b : b + 1], mask=mask))
        assert torch.equal(out[b], alone[0])
    packed = torch.tensor([0, 7, 14], dtype=torch.int32)
    starts = torch.tensor([0, 70, 140], dtype=torch.int32)
    rows = heddle.attention(
        q[:, :7].reshape(14, 4, 24),
        k.reshape(140, 2, 24),
        v.reshape(140, 2, 24),
        causal="top_left",
        q_offset=at,
        cu_seqlens_q=packed,
        cu_seqlens_k=starts,
    )
    assert torch.equal(rows.reshape(out.shape), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_results_are_not_rounded(dtype):
    q, k, v, _ = operands(dtype)
    wide = heddle.attention(q, k, v, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    narrow = heddle.attention(q, k, v)
    assert torch.equal(wide.to(dtype), narrow) and not torch.equal(wide, narrow.float())
    into = torch.empty_like(wide)
    assert heddle.attention(q, k, v, out_dtype="float32", out=into) is into and torch.equal(into, wide)
    compiled = torch.compile(lambda q, k, v: heddle.attention(q, k, v, out_dtype="float32"), fullgraph=True)
    assert torch.equal(compiled(q, k, v), wide)


def test_gradients_of_float32_results_have_the_operands_dtype():
    tensors = operands(torch.bfloat16, requires_grad=True)[:3]
    out = heddle.attention(*tensors, out_dtype="float32")
    w = torch.cos(torch.arange(out.numel())).reshape(out.shape)
    found = torch.autograd.grad((out * w).sum(), tensors)
    exact = torch.autograd.grad((heddle.attention(*(x.float() for x in tensors)) * w).sum(), tensors)
    for x, y in zip(found, exact):
        assert x.dtype == torch.bfloat16
        assert (x.float() - y.float()).abs().max() < 0.03 * y.float().abs().max()


@pytest.mark.parametrize("with_sink", [True, False])
def test_merge_and_its_gradients_are_the_formula(with_sink):
    os, lses, sink = parts(requires_grad=True)
    inputs = [*os, *lses, *([sink] if with_sink else [])]
    found, expected = (
        heddle.merge_attention(os, lses, sink if with_sink else None),
        plain_merge(os, lses, sink if with_sink else None),
    )
    w, u = torch.cos(torch.arange(found[0].numel())).reshape(found[0].shape), torch.ones(2, 4, 9)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x.double(), y, atol=1e-6, rtol=1e-6)
    for x, y in zip(
        torch.autograd.grad((found[0] * w).sum() + (found[1] * u).sum(), inputs),
        torch.autograd.grad((expected[0] * w).sum() + (expected[1] * u).sum(), inputs),
    ):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-5)


def test_only_what_is_asked_for_has_a_gradient():
    os, lses, _ = parts()
    lses[1].requires_grad_()
    out, lse = heddle.merge_attention(os, lses)
    out.sum().backward()
    assert lses[1].grad is not None and lses[0].grad is None and os[0].grad is None
    assert not heddle.merge_attention(os, [x.detach() for x in lses])[0].requires_grad


def test_operators_hold_what_torch_asks_of_them():
    operators = torch.ops.heddle
    os, lses, sink = parts(requires_grad=True)
    plain = [x.detach() for x in os], [x.detach() for x in lses]
    torch.library.opcheck(operators.merge_attention.default, (os, lses, sink, False))
    torch.library.opcheck(operators.merge_attention.default, (os, lses, None, True))
    out, lse = torch.empty(2, 9, 4, 16), torch.empty(2, 4, 9)
    torch.library.opcheck(operators.merge_attention_out.default, (*plain, None, out, lse))
    d_o, d_lse = torch.randn(2, 9, 4, 16), torch.randn(2, 4, 9)
    for sample in (
        (d_o, d_lse, *plain, sink.detach(), [True, True, True]),
        (d_o, None, *plain, None, [False, True, False]),
    ):
        torch.library.opcheck(operators.merge_attention_backward.default, sample)


def test_compiled_and_transformed_are_the_same():
    os, lses, sink = parts()

    def loss(o, lse, sink):
        out, merged_lse = heddle.merge_attention([o, *os[1:]], [lse, *lses[1:]], sink)
        return (out * out).sum() + merged_lse.sum()

    given = (os[0], lses[0], sink)
    expected = torch.autograd.grad(loss(*(x.requires_grad_() for x in given)), given)
    given = tuple(x.detach() for x in given)
    for x, y in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*given), expected):
        assert torch.equal(x, y)
    compiled = torch.compile(loss, fullgraph=True)
    assert torch.equal(compiled(*given), loss(*given))


def test_numpy_arrays_and_results_in_place():
    os, lses, sink = parts()
    expected, expected_lse = heddle.merge_attention(os, lses, sink)
    arrays = [x.numpy() for x in os], [x.numpy() for x in lses], sink.numpy()
    out, lse = heddle.merge_attention(*arrays)
    assert isinstance(out, np.ndarray) and np.array_equal(out, expected.numpy())
    assert np.array_equal(lse, expected_lse.numpy())
    for given in (arrays, (os, lses, sink)):  # the running result of a loop
        again, again_lse = heddle.merge_attention(*given, out=given[0][0], lse_out=given[1][0])
        assert again is given[0][0] and again_lse is given[1][0]
        assert np.array_equal(np.asarray(again), out) and np.array_equal(np.asarray(again_lse), lse)
        os[0].copy_(parts()[0][0])  # memory that both share
        lses[0].copy_(parts()[1][0])


def test_arrays_of_other_libraries():
    os, lses, sink = parts(torch.bfloat16)
    for dtype in (None, "float32"):
        expected = heddle.merge_attention(os, lses, sink, out_dtype=dtype)
        exported = [OnlyDLPack(x) for x in os], [OnlyDLPack(x) for x in lses], OnlyDLPack(sink)
        for x, y in zip(heddle.merge_attention(*exported, out_dtype=dtype), expected):
            assert torch.equal(torch.from_dlpack(x), y)
    q, k, v, _ = operands(torch.bfloat16)
    out = heddle.attention(*(OnlyDLPack(x) for x in (q, k, v)), out_dtype="float32", q_offset=5)
    assert torch.equal(torch.from_dlpack(out), heddle.attention(q, k, v, out_dtype="float32"))
    at = torch.tensor([5, 5], dtype=torch.int32)
    for offset in (5, np.int64(5), at, at.numpy(), OnlyDLPack(at)):
        moved = heddle.attention(*(x.float().numpy() for x in (q, k, v)), causal="top_left", q_offset=offset)
        expected = heddle.attention(*(x.float() for x in (q, k, v)), causal="top_left", q_offset=at)
        assert np.array_equal(moved, expected.numpy())


def test_shapes_without_data():
    os, lses = ([x.to("meta") for x in part] for part in parts(torch.bfloat16)[:2])
    out, lse = heddle.merge_attention(os, lses, out_dtype="float32")
    assert out.shape == (2, 9, 4, 16) and out.dtype == torch.float32 and out.is_meta and lse.shape == (2, 4, 9)


def test_narrow_parts_merge_into_either_dtype():
    os, lses, _ = parts(torch.bfloat16)
    wide, _ = heddle.merge_attention(os, lses, out_dtype="float32")
    narrow, _ = heddle.merge_attention(os, lses)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    assert torch.equal(wide.bfloat16(), narrow)
    alone, lse = heddle.merge_attention(os[:1], lses[:1])
    assert torch.equal(alone, os[0]) and torch.equal(lse, lses[0])


def test_float32_parts_are_rounded_once():
    os, lses, sink = parts()
    wide, lse = heddle.merge_attention(os, lses, sink)
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.empty_like(wide, dtype=dtype)
        found, found_lse = heddle.merge_attention(os, lses, sink, out=out)
        assert found is out and torch.equal(out, wide.to(dtype)) and torch.equal(found_lse, lse)
    half = np.empty(wide.shape, np.float16)
    heddle.merge_attention([x.numpy() for x in os], [x.numpy() for x in lses], sink.numpy(), out=half)
    assert np.array_equal(half, wide.half().numpy())


def refused(kind, call, words):
    with pytest.raises(kind, match=re.escape(words)):
        call()


def test_what_is_refused():
    os, lses, sink = parts()
    q, k, v, _ = operands()
    merge = heddle.merge_attention
    refused(ValueError, lambda: merge([], []), "[merge_attention] os are 0 and lses are 0: there must be at least one")
    refused(ValueError, lambda: merge(os, lses[:2]), "os are 3 and lses are 2: there must be as many")
    refused(
        ValueError,
        lambda: merge([os[0], os[1][:1]], lses[:2]),
        "os[1] is [1, 9, 4, 16]: it must have the shape of os[0]",
    )
    refused(ValueError, lambda: merge(os[:1], [lses[0].double()]), "lses[0] is")
    refused(ValueError, lambda: merge([os[0][0, 0]], lses[:1]), "os[0] has 2 dimensions")
    refused(ValueError, lambda: merge([os[0].numpy()[0, 0]], [lses[0].numpy()]), "os[0] has 2 dimensions")
    refused(ValueError, lambda: merge(os, lses, sink[:3]), "sink is [3]: it must have one logit for each of 4 heads")
    refused(ValueError, lambda: merge(os, lses, out_dtype="float16"), "out_dtype is 'float16': it must be float32")
    refused(ValueError, lambda: merge(os, lses, out=os[1][:, :, :, ::2]), "out is [2, 9, 4, 8]: it must have the shape")
    halves = [x.half() for x in os]
    of_arrays = [x.numpy() for x in halves], [x.numpy() for x in lses]
    for given, out in (((halves, lses), halves[0].clone()), (of_arrays, halves[0].numpy().copy())):
        refused(
            ValueError,
            lambda given=given, out=out: merge(*given, out=out, out_dtype="float32"),
            "out is float16: it must be float32, which was asked for",
        )
    refused(TypeError, lambda: merge([os[0], None], lses[:2]), "os[1] is None: it must be a torch tensor")
    os[0].requires_grad_()
    refused(ValueError, lambda: merge(os, lses, out=torch.empty(2, 9, 4, 16)), "os[0] requires a gradient")

    call = heddle.attention
    refused(ValueError, lambda: call(q, k, v, q_offset=-1), "q_offset is -1: positions are from 0 to 2^31 - 1")
    refused(ValueError, lambda: call(q, k, v, key_offset=2**31), "key_offset is 2147483648: positions are from 0")
    refused(TypeError, lambda: call(q, k, v, q_offset=1.5), "q_offset is 1.5: it must be an int or an int32 array [B]")
    refused(ValueError, lambda: call(q, k, v, q_offset=1, causal="bottom_right"), "causal is bottom_right and q_offset")
    refused(ValueError, lambda: call(q, k, v, out_dtype="float16"), "out_dtype is 'float16': it must be float32")
    half = [x.half() for x in (q, k, v)]
    refused(
        ValueError,
        lambda: call(*half, out=torch.empty_like(q)),
        "out is float32: it must be float16, q's dtype, or float32 where that is asked for",
    )
    refused(
        ValueError, lambda: call(*half, out=half[0].clone(), out_dtype="float32"), "out is float16: it must be float32"
    )


@pytest.mark.parametrize(
    "option, words",
    [
        ({"q_offset": 3}, "it has no q_offset and key_offset"),
        ({"out_dtype": "float32"}, "it does not take o in float32 beside q of bfloat16"),
    ],
)
def test_explain_knows_pieces(option, words):
    shape = (2, 70, 4, 24)
    found = heddle.explain(shape, shape, shape, dtype="bfloat16", **option)
    assert found.chosen.name == "cpu"
    on_gpus = {c.reason for c in found if "cuda" in c.name or c.name.startswith("sm")}
    if not heddle._heddle.cuda_built():
        assert all("built without CUDA" in reason for reason in on_gpus)
        return
    there = heddle.explain(shape, shape, shape, dtype="bfloat16", gpu="h100", **option)
    assert there.chosen.name == ("sm90" if "q_offset" in option else "sm80")
    refused = [c for c in there if c.name.startswith("sm") and not c.supported]
    reasons = {c.reason for c in refused if not c.name.endswith("_decode")}
    assert reasons - {"it has no o in float32 without q_offset or key_offset"} == {words}
    keys = (2, 8192, 4, 24)
    decoding = heddle.explain((2, 1, 4, 24), keys, keys, dtype="bfloat16", gpu="h100", **option)
    assert decoding.chosen.name == "sm90_decode"
    for name in ("naive_cuda", "baseline_cuda"):
        assert (
            heddle.explain(shape, shape, shape, dtype="bfloat16", gpu="h100", force=name, **option).chosen.name == name
        )
