"""Pieces and merges of partial results on a GPU: results, gradients, memory of the caller's, graphs, tracing, other libraries' arrays."""

import re
from itertools import pairwise

import heddle
import pytest
import torch
from heddle import _heddle
from kit import DTYPES, OnlyDLPack
from partial_kit import OPTIONS, merged, operands, parts, plain_merge

pytestmark = pytest.mark.skipif(
    not (_heddle.cuda_built() and torch.cuda.is_available()), reason="needs a GPU and a build with CUDA"
)

# A unit in the last place of results in 16 bits; what float32 sums leave.
STEP = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = {"plain": (2, 9, 4, 16), "packed": (70, 3, 128), "odd": (1, 33, 2, 37), "widest": (1, 5, 2, 256)}


def assert_near(found, expected, size):
    torch.testing.assert_close(found.double(), expected, atol=size * 2**-21, rtol=STEP[found.dtype])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_merge_and_its_gradients_are_the_formula(count, dtype, shape):
    os, lses, sink = parts(DTYPES[dtype], True, count, "cuda", SHAPES[shape])
    assert heddle.explain_merge_attention(os, lses, sink).chosen.name == "cuda"
    assert heddle.explain_merge_attention(os, lses, sink, backward=True).chosen.name == "cuda"
    for given in (sink, None):
        for out_dtype in (None, "float32"):
            inputs = [*os, *lses, *([sink] if given is not None else [])]
            found = heddle.merge_attention(os, lses, given, out_dtype=out_dtype)
            expected = plain_merge(os, lses, given)
            assert found[0].dtype == (DTYPES[dtype] if out_dtype is None else torch.float32)
            for x, y in zip(found, expected):
                assert x.is_cuda
                assert_near(x, y, 4)
            # In the results' dtype, so that both are given the same derivatives.
            w = torch.cos(torch.arange(found[0].numel(), device="cuda")).reshape(found[0].shape).to(found[0].dtype)
            u = torch.sin(torch.arange(found[1].numel(), device="cuda")).reshape(found[1].shape)
            gradients = torch.autograd.grad(found, inputs, (w, u))
            again = torch.autograd.grad(heddle.merge_attention(os, lses, given, out_dtype=out_dtype), inputs, (w, u))
            exact = torch.autograd.grad(expected, inputs, (w.double(), u.double()))
            assert all(map(torch.equal, gradients, again))
            for x, y in zip(gradients, exact):
                assert_near(x, y.double(), 64 * (found[1].numel() if x.dim() == 1 else 1))


def test_float32_parts_are_rounded_once():
    for shape in SHAPES.values():
        os, lses, sink = parts(torch.float32, False, 3, "cuda", shape)
        wide, lse = heddle.merge_attention(os, lses, sink)
        for dtype in (torch.float16, torch.bfloat16):
            out = torch.empty_like(wide, dtype=dtype)
            found = heddle.merge_attention(os, lses, sink, out=out)
            assert found[0] is out and torch.equal(out, wide.to(dtype)) and torch.equal(found[1], lse)


def test_as_on_the_cpu():
    for name, shape in SHAPES.items():
        os, lses, sink = parts(count=4, rows=shape)
        lses[1][..., ::2] = -torch.inf
        os[1].fill_(torch.nan)
        lses[1][..., 1::2] = -torch.inf
        there = heddle.merge_attention([x.cuda() for x in os], [x.cuda() for x in lses], sink.cuda())
        for x, y in zip(there, heddle.merge_attention(os, lses, sink)):
            torch.testing.assert_close(x.cpu(), y, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("rows", [(0, 70), (13, 41)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("force", ["naive_cuda", "baseline_cuda", "sm80"])
def test_pieces_are_the_call(force, name, dtype, rows):
    if (force, name) == ("sm80", "dropout"):
        pytest.skip("it has no dropout beside q_offset and key_offset")
    q, k, v, sink = operands(DTYPES[dtype], device="cuda")
    options = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()}
    out, lse = merged(q, k, v, sink, {**options, "force": force}, rows)
    whole, whole_lse = heddle.attention(*(x.float() for x in (q, k, v)), sink=sink, return_lse=True, **options)
    near = {"f32": 1e-5, "f16": 3e-3, "bf16": 2e-2}[dtype]
    torch.testing.assert_close(out, whole[:, rows[0] : rows[1]], atol=near, rtol=near)
    torch.testing.assert_close(lse, whole_lse[..., rows[0] : rows[1]], atol=near, rtol=near)


# Pooled keys, as native sparse attention has them: by Hopper's forward, many tiles of rows a CTA, as in float32.
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 1), (3, 3)])
@pytest.mark.parametrize("size", [64, 72, 128])
@pytest.mark.parametrize("step", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pooled_keys_on_hopper(dtype, step, size, heads, kv_heads):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    make = torch.Generator().manual_seed(7)
    lengths = [9000, 1, 2 * step + 5, 3333] if step > 1 else [900, 1, 333, 200]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total, kept = int(starts[-1]), step // 2  # blocks of step + kept keys
    pooled = starts // step
    q = torch.randn(total, heads, size, generator=make).to("cuda", dtype)
    k, v = (torch.randn(int(pooled[-1]), kv_heads, size, generator=make).to("cuda", dtype) for _ in range(2))
    used = torch.tensor([max((n - kept) // step, 0) for n in lengths], dtype=torch.int32).cuda()
    packed = dict(
        cu_seqlens_q=starts.cuda(), cu_seqlens_k=pooled.cuda(), max_seqlen_q=max(lengths), max_seqlen_k=max(lengths) // step,
        seqused_k=used,
    )  # fmt: skip
    alone = (q[None, : lengths[0]], k[None, : lengths[0] // step], v[None, : lengths[0] // step])
    for given, more in ((packed, (q, k, v)), ({}, alone)):
        given = dict(given, causal="top_left", key_step=step, key_offset=step + kept - 1)
        assert heddle.explain(*more, **given).chosen.name == "sm90"
        given["return_lse"] = True
        out, lse = heddle.attention(*more, force="sm90", **given)
        exact, exact_lse = heddle.attention(*(x.float() for x in more), **given)
        near = {torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(out.float(), exact, atol=near, rtol=near)
        assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
        assert bool((lse == -torch.inf).any()) == (step > 1)
        torch.testing.assert_close(lse, exact_lse, atol=near, rtol=near)
        again = heddle.attention(*more, force="sm90", **given)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_results_are_not_rounded(dtype):
    q, k, v, _ = operands(dtype, device="cuda")
    for force in ("naive_cuda", "baseline_cuda", "sm80"):
        wide, narrow = (heddle.attention(q, k, v, out_dtype=x, force=force) for x in (torch.float32, None))
        assert wide.dtype == torch.float32 and narrow.dtype == dtype
        assert torch.equal(wide.to(dtype), narrow) and not torch.equal(wide, narrow.float())


def test_pieces_of_keys_are_the_call():
    make = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 70, h, 64, generator=make).cuda().requires_grad_() for h in (4, 2, 2))
    pieces = [heddle.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 1), (1, 30), (30, 70))]
    out, lse = heddle.merge_attention(*zip(*pieces))
    whole, whole_lse = heddle.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, whole_lse, atol=2e-5, rtol=2e-5)
    w = torch.cos(torch.arange(out.numel(), device="cuda")).reshape(out.shape)
    found, expected = (torch.autograd.grad((x * w).sum(), (q, k, v)) for x in (out, whole))
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("cuts", [(0, 70), (0, 30, 70), (0, 1, 64, 70)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_pieces_add_up_to_the_calls(dtype, cuts):
    q, k, v, sink = operands(DTYPES[dtype], device="cuda")
    options = {"causal": "top_left", "out_dtype": "float32"}
    make = torch.Generator().manual_seed(4)
    d_o, d_lse = torch.randn(2, 70, 4, 24, generator=make).cuda(), torch.randn(2, 4, 70, generator=make).cuda()
    pieces = [(k[:, a:b], v[:, a:b], {**options, "key_offset": a}) for a, b in pairwise(cuts)]

    def gradients_by(call):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
        results = call(*leaves)
        return [x.detach() for x in results], torch.autograd.grad(results, leaves, (d_o, d_lse))

    def through_merge(q, k, v, sink):
        parts = [
            heddle.attention(q, k[:, a:b], v[:, a:b], return_lse=True, key_offset=a, **options)
            for a, b in pairwise(cuts)
        ]
        return heddle.merge_attention(*zip(*parts), sink, out_dtype="float32")

    whole, expected = gradients_by(
        lambda q, k, v, sink: heddle.attention(q, k, v, sink=sink, return_lse=True, **options)
    )
    merged_results, by_autograd = gradients_by(through_merge)
    near = {"f32": 1e-5, "f16": 3e-3, "bf16": 2e-2}[dtype]
    for x, y in zip(merged_results, whole):
        torch.testing.assert_close(x, y, atol=near, rtol=near)
    by_hand = [torch.zeros(x.shape, device="cuda") for x in (q, k, v, sink)]
    for (a, b), (some_k, some_v, piece) in zip(pairwise(cuts), pieces):
        to = dict(dq=by_hand[0], dk=by_hand[1][:, a:b], dv=by_hand[2][:, a:b], dsink=by_hand[3])
        heddle.attention_backward(
            q, some_k, some_v, *merged_results, d_o, d_lse, sink=sink, accumulate=True, merged=True, **to, **piece
        )
    for found in (by_autograd, by_hand):
        for name, x, y in zip(("dq", "dk", "dv", "dsink"), found, expected):
            assert (x.float() - y.float()).norm() <= near * y.float().norm(), name


@pytest.mark.parametrize("deterministic", [False, True])
def test_accumulate_adds_once(deterministic):
    q, k, v, _ = operands(torch.bfloat16, device="cuda")
    o, lse = heddle.attention(q, k, v, return_lse=True)
    alone, added = ([torch.full(x.shape, 0.3, device="cuda") for x in (q, k, v)] for _ in range(2))
    for to, accumulate in ((alone, False), (added, True), (added, True)):
        heddle.attention_backward(
            q, k, v, o, lse, torch.ones_like(o), **dict(zip(("dq", "dk", "dv"), to)),
            accumulate=accumulate, deterministic=deterministic,
        )  # fmt: skip
    for x, y in zip(alone[0 if deterministic else 1 :], added[0 if deterministic else 1 :]):
        assert torch.equal(y, torch.full_like(x, 0.3) + x + x)
    torch.testing.assert_close(added[0], 0.3 + 2 * alone[0], atol=1e-4, rtol=1e-4)


def test_derivatives_of_sums_and_views():
    os, lses, sink = parts(requires_grad=True, device="cuda")
    out, lse = heddle.merge_attention([x.transpose(1, 2).contiguous().transpose(1, 2) for x in os], lses, sink)
    expected, expected_lse = plain_merge(os, lses, sink)
    found = torch.autograd.grad(out.sum() + lse.sum(), (*os, *lses, sink))  # d_o with strides of 0
    exact = torch.autograd.grad(expected.sum() + expected_lse.sum(), (*os, *lses, sink), retain_graph=True)
    for x, y in zip(found, exact):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)
    out, lse = heddle.merge_attention(os, lses, sink)
    (found,) = torch.autograd.grad(lse.sum(), sink)  # no derivative of out
    (exact,) = torch.autograd.grad(expected_lse.sum(), sink)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [3, 40])
def test_results_go_where_the_caller_says(count):
    os, lses, sink = parts(torch.bfloat16, count=count, device="cuda")
    expected, expected_lse = heddle.merge_attention(os, lses, sink)
    out, lse = heddle.merge_attention(os, lses, sink, out=os[-1], lse_out=lses[-1])
    assert out is os[-1] and lse is lses[-1]
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    whole = torch.full((2, 9, 4, 40), 7.0, dtype=torch.bfloat16, device="cuda")
    os, lses, sink = parts(torch.bfloat16, count=count, device="cuda")
    assert torch.equal(heddle.merge_attention(os, lses, sink, out=whole[..., 3:19])[0], expected)
    assert bool((whole[..., :3] == 7).all()) and bool((whole[..., 19:] == 7).all())


def test_captured_compiled_transformed():
    os, lses, sink = parts(device="cuda", count=40)
    out, lse = torch.empty_like(os[0]), torch.empty_like(lses[0])
    heddle.merge_attention(os, lses, sink, out=out, lse_out=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        heddle.merge_attention(os, lses, sink, out=out, lse_out=lse)
    os[3].mul_(-2)
    lses[7].add_(1)
    graph.replay()
    torch.cuda.synchronize()
    expected = heddle.merge_attention(os, lses, sink)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])

    def loss(o, lse, sink):
        out, merged_lse = heddle.merge_attention([o, *os[1:]], [lse, *lses[1:]], sink)
        return (out * out).sum() + merged_lse.sum()

    given = (os[0], lses[0], sink)
    gradients = torch.autograd.grad(loss(*(x.requires_grad_() for x in given)), given)
    given = tuple(x.detach() for x in given)
    assert all(map(torch.equal, torch.func.grad(loss, argnums=(0, 1, 2))(*given), gradients))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), loss(*given))


def test_operators_hold_what_torch_asks_of_them():
    operators = torch.ops.heddle
    os, lses, sink = parts(requires_grad=True, device="cuda")
    plain = [x.detach() for x in os], [x.detach() for x in lses]
    torch.library.opcheck(operators.merge_attention.default, (os, lses, sink, False))
    out, lse = torch.empty_like(plain[0][0]), torch.empty_like(plain[1][0])
    torch.library.opcheck(operators.merge_attention_out.default, (*plain, None, out, lse))
    sample = (torch.randn_like(out), torch.randn_like(lse), *plain, sink.detach(), [True, True, True])
    torch.library.opcheck(operators.merge_attention_backward.default, sample)


def test_on_another_stream():
    os, lses, sink = parts(device="cuda", count=40, rows=(2, 512, 8, 64))
    expected = heddle.merge_attention([x * 2 for x in os], lses, sink)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        found = heddle.merge_attention([x * 2 for x in os], lses, sink)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("count", [3, 40])
def test_arrays_of_other_libraries(count):
    os, lses, sink = parts(torch.float16, count=count, device="cuda")
    expected, expected_lse = heddle.merge_attention(os, lses, sink, out_dtype="float32")
    out, lse = torch.empty(2, 9, 4, 16, device="cuda"), torch.empty(2, 4, 9, device="cuda")
    arrays = [[OnlyDLPack(x) for x in part] for part in (os, lses)]
    heddle.merge_attention(*arrays, OnlyDLPack(sink), out_dtype="float32", out=OnlyDLPack(out), lse_out=OnlyDLPack(lse))
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_what_is_refused():
    os, lses, sink = parts(device="cuda")

    def refused(call, words):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()

    refused(lambda: heddle.merge_attention([os[0], os[1].cpu()], lses[:2]), "os[1] is on another device than os[0]")
    refused(lambda: heddle.merge_attention(os, [*lses[:2], lses[2].cpu()]), "lses[2] is on another device than os[0]")
    refused(lambda: heddle.merge_attention(os, lses, sink.cpu()), "sink is on another device than os[0]")
    refused(lambda: heddle.merge_attention(os, lses, out=os[0].cpu()), "out is on another device than")
    refused(lambda: heddle.merge_attention(os, lses, out=os[0][:, :, :, ::2]), "out is [2, 9, 4, 8]: it must have")
