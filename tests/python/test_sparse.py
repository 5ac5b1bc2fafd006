"""Attention over lists of key blocks: attention under the mask that says the same, and all that an operation is held to."""

import heddle
import numpy as np
import pytest
import torch
from dlpack_kit import Producer
from kit import assert_accurate, attending, in_orders
from sparse_kit import CASES, DV, HKV, KEYS, OPS, ROWS, Call, D, H, ints, sample, under_mask
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_under_the_mask(name, dtype):
    call = Call(name, dtype)
    out, lse = call(return_lse=True)
    exact, exact_lse, _ = under_mask(call)
    rough, rough_lse = in_orders(lambda order: under_mask(call, dtype, order)[:2])
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_accurate("out", out, exact, rough, dtype, attending(exact_lse))
    assert_accurate("lse", lse, exact_lse, rough_lse, torch.float32, attending(exact_lse))
    assert torch.equal(call(), out)
    wide = call(out_dtype="float32")
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_under_the_mask(name, dtype):
    call = Call(name, dtype, requires_grad=True)
    weight, lse_weight = (
        call.normal(*call(return_lse=False).shape).to(dtype),
        call.normal(*call(return_lse=True)[1].shape),
    )

    def gradients(out, lse, inputs):
        loss = (out * weight.to(out.dtype)).sum() + torch.where(torch.isfinite(lse), lse * lse_weight, 0).sum()
        return torch.autograd.grad(loss, inputs)

    found = gradients(*call(return_lse=True), call.inputs)
    rough = in_orders(lambda order: gradients(*under_mask(call, dtype, order)))
    rows = attending(under_mask(call)[1])
    for wanted, x, y, e, r in zip("qkv*", found, call.inputs, gradients(*under_mask(call)), rough):
        assert x.dtype == y.dtype
        assert_accurate(f"d{wanted}", x, e, r, x.dtype, rows)


def test_gradients_only_where_asked():
    call = Call("counts")
    call.v.requires_grad_()
    call().sum().backward()
    assert call.v.grad is not None and call.q.grad is None and call.k.grad is None
    call.v.requires_grad_(False)
    assert not call().requires_grad
    call.sink.requires_grad_()
    out, lse = call(return_lse=True)
    (dsink,) = torch.autograd.grad(lse.sum(), call.sink, retain_graph=True)
    assert dsink.shape == (H,) and dsink.abs().sum() > 0
    with torch.no_grad():
        assert torch.equal(call(), out) and not call().requires_grad


def test_gradients_of_float32_results_have_the_operands_dtype():
    call = Call("bottom right", torch.bfloat16, requires_grad=True)
    found = torch.autograd.grad(call(out_dtype="float32").sum(), call.inputs)
    expected = torch.autograd.grad(call().sum(), call.inputs)
    for x, y in zip(found, expected):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x, y, atol=0.05, rtol=0.05)


def test_in_place_changes_of_lists_are_noticed():
    call = Call("counts", requires_grad=True)
    masked = Call("masks", requires_grad=True)
    for changed, lists in (
        (call, call.blocks),
        (call, call.counts),
        (masked, masked.masks),
        (masked, masked.mask_ids),
    ):
        out = changed()
        lists += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_reference_serves_masks_biases_and_dropout():
    call = Call("plain", requires_grad=True)
    rows, keys = ROWS[0], KEYS[0]
    mask = torch.rand(keys, generator=call.make) > 0.3
    bias = call.normal(rows, keys).requires_grad_()
    out = call(mask=mask, bias=bias, force="reference", dropout_p=0.25, dropout_seed=3)
    held = torch.cat([m for *_, m in call.sequences()])
    expected = heddle.attention(
        call.q, call.k, call.v, mask=held & mask, bias=bias, force="reference", dropout_p=0.25, dropout_seed=3
    )
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(x.square().sum(), [*call.inputs, bias]) for x in (out, expected))
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", ["counts", "packed", "masks"])
def test_other_arrays_and_results_that_the_caller_has(name):
    call = Call(name)
    expected = call(return_lse=True)
    names = ("cu_seqlens_q", "cu_seqlens_k") if call.packed else ()
    starts = dict(zip(names, (ints(0, ROWS[0], sum(ROWS)).numpy(), ints(0, KEYS[0], sum(KEYS)).numpy())))
    sink = None if call.sink is None else call.sink.numpy()
    operands = [x if x is None else x.numpy() for x in (call.q, call.k, call.v, call.blocks, call.counts)]
    options = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in call.lists.items()}
    options |= {**call.options, **starts}

    def check(found):
        for x, y in zip(found, expected, strict=True):
            assert np.array_equal(x, y.numpy())

    found = heddle.sparse_attention(*operands, sink=sink, return_lse=True, **options)
    assert all(isinstance(x, np.ndarray) for x in found)
    check(found)
    outs = [np.full_like(x, 7) for x in found]
    again = heddle.sparse_attention(*operands, sink=sink, return_lse=True, out=outs[0], lse_out=outs[1], **options)
    assert again[0] is outs[0] and again[1] is outs[1]
    check(again)
    exported = {n: Producer(x) for n, x in options.items() if isinstance(x, np.ndarray)}
    found = heddle.sparse_attention(
        *(x if x is None else Producer(x) for x in operands),
        sink=None if sink is None else Producer(sink),
        return_lse=True,
        **{**options, **exported},
    )
    check([torch.from_dlpack(x).numpy() for x in found])
    for kept in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with kept:
            outs = [torch.full_like(x, 7) for x in expected]
            again = call(return_lse=True, out=outs[0], lse_out=outs[1])
            assert again[0] is outs[0] and again[1] is outs[1]
            check([x.numpy() for x in again])
            half = call(return_lse=True, lse_out=outs[1])
            assert half[1] is outs[1] and torch.equal(half[0], expected[0])


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", ["rows share lists", "packed", "masks"])
def test_opcheck(name):
    operands, options = sample(Call(name, requires_grad=True))
    torch.library.opcheck(OPS.sparse_attention.default, (*operands, *options), test_utils=CHECKS)
    operands, options = sample(Call(name))
    out, lse = OPS.sparse_attention(*operands, *options)
    for lse_out in (torch.empty_like(lse), None):
        into = (*operands, torch.empty_like(out), lse_out, *options)
        torch.library.opcheck(OPS.sparse_attention_out.default, into, test_utils=CHECKS)
    for d_lse in (None, torch.randn_like(lse)):
        wanted = [True, False, True, False, d_lse is None and options[3] is not None]
        backward = (torch.randn_like(out), d_lse, *operands, out, lse, wanted, *options)
        torch.library.opcheck(OPS.sparse_attention_backward.default, backward, test_utils=CHECKS)


def test_compiled():
    def step(q, k, v, blocks, sink):
        chosen = torch.where(blocks > 4, 0, blocks)
        out, lse = heddle.sparse_attention(
            q * 2, k, v, chosen, block_size=32, causal="bottom_right", sink=sink, return_lse=True
        )
        return (out.sin() * out).sum() + torch.where(torch.isfinite(lse), lse, 0).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    call = Call("bottom right", requires_grad=True)
    for rows in (70, 33):
        given = [call.q[:, :rows].detach().requires_grad_(), call.k, call.v]
        arguments = [*given, call.blocks[:, :rows], torch.zeros(H)]
        found, expected = compiled(*arguments), step(*arguments)
        torch.testing.assert_close(found, expected)
        for x, y in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given)):
            torch.testing.assert_close(x, y)


def test_compiled_with_a_result_that_the_caller_has():
    call = Call("plain")
    out = torch.empty(2, ROWS[0], H, DV)

    def step(q):
        return heddle.sparse_attention(q, call.k, call.v, call.blocks, out=out, block_size=32) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(call.q), 2 * call()) and torch.equal(out, call())


def test_shapes_without_data():
    call = Call("counts", torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (call.q, call.k, call.v, call.blocks, call.counts)]
        out, lse = heddle.sparse_attention(*fake, return_lse=True)
        assert type(out).__name__ == "FakeTensor" and out.dtype == torch.bfloat16
        assert out.shape == (2, ROWS[0], H, DV) and lse.shape == (2, H, ROWS[0])
    there = [x.to("meta") for x in (call.q, call.k, call.v, call.blocks)]
    there[0].requires_grad_()
    out = heddle.sparse_attention(*there, out_dtype="float32")
    assert out.is_meta and out.shape == (2, ROWS[0], H, DV) and out.dtype == torch.float32
    (dq,) = torch.autograd.grad(out.sum(), there[0])
    assert dq.is_meta and dq.shape == call.q.shape and dq.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_map_lists_too():
    call = Call("rows share lists", requires_grad=True)
    many = torch.stack([call.blocks, call.blocks.flip(1)])

    def loss(q, blocks):
        out, lse = heddle.sparse_attention(q, call.k, call.v, blocks, return_lse=True, **call.lists)
        return out.square().sum() + torch.where(torch.isfinite(lse), lse, 0).sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(call.q.detach(), many)
    for x, blocks in zip(found, many):
        torch.testing.assert_close(x, torch.autograd.grad(loss(call.q, blocks), call.q)[0])


def test_autocast():
    call = Call("rows share lists")
    expected = heddle.sparse_attention(
        *(x.bfloat16() for x in (call.q, call.k, call.v)), call.blocks, sink=call.sink, **call.lists
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(), expected)


def test_a_direct_call_has_the_operators_bits():
    for name in ("counts", "packed", "masks"):
        call = Call(name)
        operands, options = sample(call)
        for x, y in zip(call(return_lse=True), OPS.sparse_attention(*operands, *options)):
            assert torch.equal(x, y)
    with torch.profiler.profile() as profile:
        call()
    assert any("heddle::sparse_attention" in event.key for event in profile.key_averages())


def test_strides_are_free():
    call = Call("a list for each head")
    expected = call()
    call.blocks = call.blocks.transpose(1, 2).contiguous().transpose(1, 2)
    call.q, call.k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (call.q, call.k))
    assert torch.equal(call(), expected)
    loss = call.q.requires_grad_()
    (dq,) = torch.autograd.grad(call().sum(), loss)  # a gradient of one element, expanded
    (again,) = torch.autograd.grad(call(), loss, torch.ones_like(expected))
    assert torch.equal(dq, again)


def test_pages():
    call = Call("plain")
    k, v = call.k, call.v
    pages = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, 6)).reshape(-1, 16, HKV, D)
    values = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 6)).reshape(-1, 16, HKV, DV)
    table = torch.arange(12, dtype=torch.int32).reshape(2, 6)
    expected = call()
    call.k, call.v = pages, values
    found = call(page_table=table, seqused_k=ints(90, 90))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    call.q.requires_grad_()
    with pytest.raises(
        ValueError, match=r"\[sparse_attention_backward\] page_table has no backward: gather the keys first"
    ):
        call(page_table=table, seqused_k=ints(90, 90)).sum().backward()


@pytest.mark.parametrize("backward", [False, True])
def test_explain(backward):
    call = Call("counts")
    given = {**call.lists, "causal": "bottom_right", "backward": backward}
    found = heddle.explain_sparse_attention(call.q, call.k, call.v, call.blocks, call.counts, **given)
    assert [(c.name, c.method, c.chosen) for c in found][:2] == [
        ("cpu", "flash", True),
        ("reference", "reference", False),
    ]
    assert "gathered by blocks of 32 keys" in found.chosen.plan and found.chosen.workspace > 0
    assert found[1].reason == "it runs only when it is asked for"
    tensors = call.q, call.k, call.v, call.blocks, call.counts
    assert heddle.explain_sparse_attention(*(x.numpy() for x in tensors), **given) == found
    assert heddle.explain_sparse_attention(*(tuple(x.shape) for x in tensors), **given) == found
    narrow = heddle.explain_sparse_attention(*(tuple(x.shape) for x in tensors), dtype="bf16", **given)
    assert narrow.chosen.seconds > 0
    words = "it has no gradients with ALiBi or softcap" if backward else ""
    refused = heddle.explain_sparse_attention(*tensors, softcap=1.0, **given)
    assert refused[0].reason == words and (refused.chosen is None) == backward
    assert heddle.explain_sparse_attention(*tensors, force="reference", **given).chosen.name == "reference"
    operation = "explain_sparse_attention_backward" if backward else "explain_sparse_attention"
    with pytest.raises(ValueError, match=rf"\[{operation}\] block_size is 48: it must be 16, 32, 64 or 128"):
        heddle.explain_sparse_attention(*tensors, **{**given, "block_size": 48})
    with pytest.raises(ValueError, match=r"\[explain_sparse_attention\] blocks is int64: it must be int32"):
        heddle.explain_sparse_attention(*tensors[:3], call.blocks.long(), **given)


@pytest.mark.parametrize("name", CASES)
def test_lists_one_behind_the_other(name):
    call = Call(name, requires_grad=True)
    expected = call(return_lse=True)
    gradients = torch.autograd.grad(expected[0].sum(), call.inputs)
    offsets = call.lie_one_behind_the_other()
    found = call(return_lse=True, offsets=offsets)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, torch.autograd.grad(found[0].sum(), call.inputs), gradients))
    call = Call(name)
    offsets = call.lie_one_behind_the_other()
    torch.compiler.reset()  # else the cases are too many for one function
    compiled = torch.compile(lambda: call(offsets=offsets), fullgraph=True)
    assert torch.equal(compiled(), expected[0])
    assert heddle.explain_sparse_attention(
        call.q, call.k, call.v, call.blocks, offsets=offsets, **call.lists
    ) if "packed" not in name else True  # fmt: skip
    for array in ("q", "k", "v", "blocks", "sink", "masks", "mask_ids"):
        x = getattr(call, array)
        setattr(call, array, None if x is None else x.numpy())
    assert (call(offsets=offsets.numpy()) == expected[0].detach().numpy()).all()
