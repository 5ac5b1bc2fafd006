"""Attention over lists of key blocks: attention under the mask that says the same, and all that an operation is held to."""

import re

import heddle
import numpy as np
import pytest
import torch
from dlpack_kit import Producer
from heddle._options import pack
from kit import assert_accurate, plain
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.heddle
H, HKV, D, DV = 4, 2, 24, 20
ROWS, KEYS = (70, 41), (90, 150)  # of packed sequences; dense ones have the first

#: name: (shape of the lists, options)
CASES = {
    "plain": ({}, {}),
    "causal": ({"keys": 70}, {"causal": "top_left"}),
    "bottom right": ({"units": HKV, "entries": 3}, {"causal": "bottom_right"}),
    "a list for each head": ({"units": H, "block_size": 16}, {}),
    "counts": ({"counts": True, "units": HKV}, {"causal": "bottom_right", "sink": True}),
    "rows share lists": ({"query_rows": 16, "units": HKV}, {"sink": True}),
    "window": ({"units": HKV, "entries": 4}, {"window": (40, 11)}),
    "offsets": ({}, {"causal": "top_left", "q_offset": 30}),
    "packed": ({"packed": True, "units": HKV, "counts": True}, {"causal": "bottom_right"}),
    "packed rows share lists": ({"packed": True, "query_rows": 8}, {"sink": True}),
}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Call:
    """The arguments of a call, and those of attention() that say the same."""

    def __init__(self, name, dtype=torch.float32, requires_grad=False):
        shape, options = CASES[name]
        self.make = torch.Generator().manual_seed(5)
        self.packed, self.rows_of_list = shape.get("packed", False), shape.get("query_rows", 1)
        self.block_size = shape.get("block_size", 32)
        units, entries = shape.get("units", 1), shape.get("entries", 2)
        keys = shape.get("keys", KEYS[0])
        if self.packed:
            rows, keys = sum(ROWS), sum(KEYS)
            lead = [rows if self.rows_of_list == 1 else rows // self.rows_of_list + 2, units]
            extents = (rows,), (keys,)
        else:
            lead = [2, -(-ROWS[0] // self.rows_of_list), units]
            extents = (2, ROWS[0]), (2, keys)
        # Beside blocks of the sequence some that name none, and some twice.
        self.blocks = torch.randint(-1, 6, (*lead, entries), generator=self.make, dtype=torch.int32)
        self.counts = None
        if shape.get("counts"):
            self.counts = torch.randint(0, entries + 1, lead, generator=self.make, dtype=torch.int32)
        self.q, self.k, self.v = (
            self.normal(*e, h, d).to(dtype).requires_grad_(requires_grad)
            for e, h, d in ((extents[0], H, D), (extents[1], HKV, D), (extents[1], HKV, DV))
        )
        self.options = dict(options)
        self.sink = None
        if self.options.pop("sink", False):
            self.sink = self.normal(H).requires_grad_(requires_grad)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.make)

    @property
    def inputs(self):
        return [x for x in (self.q, self.k, self.v, self.sink) if x is not None]

    @property
    def lists(self):
        return {"block_size": self.block_size, "query_rows": self.rows_of_list}

    def __call__(self, **more):
        packed = {}
        if self.packed:
            packed = {
                "cu_seqlens_q": ints(0, ROWS[0], sum(ROWS)),
                "cu_seqlens_k": ints(0, KEYS[0], sum(KEYS)),
            }
        options = {**self.lists, **self.options, **packed, "sink": self.sink, **more}
        return heddle.sparse_attention(self.q, self.k, self.v, self.blocks, self.counts, **options)

    def keep(self, lists, counts, rows, keys):
        """bool [H, rows, keys], of a sequence's lists [N, L, n]."""
        entries = torch.arange(lists.shape[-1])
        listed = torch.where(entries < counts[..., None], lists, -1) if counts is not None else lists
        blocks = torch.arange(-(-keys // self.block_size))
        held = (listed[..., None] == blocks).any(-2)  # [N, L, blocks]
        held = held.repeat_interleave(self.rows_of_list, 0)[:rows].repeat_interleave(self.block_size, 2)[..., :keys]
        return held.repeat_interleave(H // held.shape[1], 1).transpose(0, 1)

    def sequences(self):
        """(q, k, v, mask [1, H, Sq, Sk]) of each, for attention()."""
        for b in range(2):
            counts = None
            if self.packed:
                first = sum(ROWS[:b]) // self.rows_of_list + (b if self.rows_of_list > 1 else 0)
                many = -(-ROWS[b] // self.rows_of_list)
                lists = self.blocks[first : first + many]
                counts = None if self.counts is None else self.counts[first : first + many]
                q = self.q[sum(ROWS[:b]) : sum(ROWS[: b + 1])][None]
                k, v = (x[sum(KEYS[:b]) : sum(KEYS[: b + 1])][None] for x in (self.k, self.v))
            else:
                lists, counts = self.blocks[b], None if self.counts is None else self.counts[b]
                q, k, v = self.q[b : b + 1], self.k[b : b + 1], self.v[b : b + 1]
            yield q, k, v, self.keep(lists, counts, q.shape[1], k.shape[1])[None]

    def masked(self, attend):
        """(out, lse) of attend(q, k, v, mask=..., ...), laid out as the call's."""
        found = [attend(*qkv, mask=mask, sink=self.sink, **self.options) for *qkv, mask in self.sequences()]
        outs, lses = zip(*found)
        if self.packed:
            return torch.cat([o[0] for o in outs]), torch.cat([x[0] for x in lses], -1)
        return torch.cat(outs), torch.cat(lses)


def masked_attention(q, k, v, **options):
    return heddle.attention(q, k, v, return_lse=True, **options)


def in_double(q, k, v, mask, q_offset=0, **options):
    if q_offset:  # what kit.plain() has no word for
        mask, options = mask & (torch.arange(k.shape[1]) <= q_offset + torch.arange(q.shape[1])[:, None]), {}
    return plain(q.double(), k.double(), v.double(), mask=mask, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_under_the_mask(name, dtype):
    call = Call(name, dtype)
    out, lse = call(return_lse=True)
    exact, exact_lse = call.masked(in_double)
    rough, rough_lse = call.masked(masked_attention)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_accurate("out", out, exact, rough, dtype)
    assert_accurate("lse", lse, exact_lse, rough_lse, torch.float32)
    assert torch.equal(call(), out)
    wide = call(out_dtype="float32")
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_under_the_mask(name, dtype):
    call = Call(name, dtype, requires_grad=True)
    weight, lse_weight = call.normal(*call(return_lse=False).shape), call.normal(*call(return_lse=True)[1].shape)

    def gradients(out, lse):
        loss = (out * weight.to(out.dtype)).sum() + torch.where(torch.isfinite(lse), lse * lse_weight, 0).sum()
        return torch.autograd.grad(loss, call.inputs)

    found = gradients(*call(return_lse=True))
    rough, exact = gradients(*call.masked(masked_attention)), gradients(*call.masked(in_double))
    for wanted, x, e, r in zip("qkv*", found, exact, rough):
        assert x.dtype == e.dtype
        # in_double() gives gradients in the operands' dtype, the last rounding of which the rule allows for.
        assert_accurate(f"d{wanted}", x, e.double(), r, dtype)


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
    for lists in (call.blocks, call.counts):
        out = call()
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


@pytest.mark.parametrize("name", ["counts", "packed"])
def test_other_arrays_and_results_that_the_caller_has(name):
    call = Call(name)
    expected = call(return_lse=True)
    names = ("cu_seqlens_q", "cu_seqlens_k") if call.packed else ()
    starts = dict(zip(names, (ints(0, ROWS[0], sum(ROWS)).numpy(), ints(0, KEYS[0], sum(KEYS)).numpy())))
    sink = None if call.sink is None else call.sink.numpy()
    operands = [x.numpy() for x in (call.q, call.k, call.v, call.blocks, call.counts)]
    options = {**call.lists, **call.options, **starts}

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
    exported = {n: Producer(x) for n, x in starts.items()}
    found = heddle.sparse_attention(
        *map(Producer, operands),
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


def sample(call, **options):
    if call.packed:
        options |= {"cu_seqlens_q": ints(0, ROWS[0], sum(ROWS)), "cu_seqlens_k": ints(0, KEYS[0], sum(KEYS))}
        options |= {"max_seqlen_q": max(ROWS), "max_seqlen_k": max(KEYS)}
    operands = call.q, call.k, call.v, call.blocks, call.counts, call.block_size, call.rows_of_list
    return operands, pack(sink=call.sink, **call.options, **options)


@pytest.mark.parametrize("name", ["rows share lists", "packed"])
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
    for name in ("counts", "packed"):
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


def refusals():
    """name: (what differs from a call that is served, the error, its words)."""
    kinds = "for each of 2 key/value heads or for each of 4 query heads"
    return {
        "64 bits": (lambda x: dict(blocks=x.blocks.long()), ValueError, "_forward] blocks is int64: it must be int32"),
        "wide counts": (lambda x: dict(counts=x.counts.long()), ValueError, "_forward] counts is int64: it must be int32"),
        "no array": (lambda x: dict(blocks=[[1]]), (TypeError, ValueError), "blocks is a list: it must be a"),
        "few lists": (
            lambda x: dict(blocks=x.blocks[:, 1:], counts=None), ValueError,
            "_forward] blocks is [2, 69, 2, 2]: it must be [2, 70, L, n], a list for each row of q",
        ),
        "shared lists": (
            lambda x: dict(query_rows=16), ValueError,
            "_forward] blocks is [2, 70, 2, 2]: it must be [2, 5, L, n], a list for each 16 rows of q",
        ),
        "heads": (
            lambda x: dict(blocks=x.blocks.repeat(1, 1, 2, 1)[:, :, :3], counts=None), ValueError,
            f"_forward] blocks is [2, 70, 3, 2]: it has lists for 3 heads and must have them for 1, {kinds}",
        ),
        "counts": (
            lambda x: dict(counts=x.counts[..., :1]), ValueError,
            "_forward] counts is [2, 70, 1]: it must be a number for each list of blocks, [2, 70, 2, 2]",
        ),
        "block size": (lambda x: dict(block_size=48), ValueError, "_forward] block_size is 48: it must be 16, 32, 64 or 128"),
        "block size in words": (
            lambda x: dict(block_size="64"), TypeError, "_forward] block_size is '64': it must be an integer of 64 bits"
        ),
        "half a row": (
            lambda x: dict(query_rows=1.5), TypeError, "_forward] query_rows is 1.5: it must be an integer of 64 bits"
        ),
        "no rows": (lambda x: dict(query_rows=0), ValueError, "_forward] query_rows is 0: it must be from 1 to 1048576"),
        "scale": (lambda x: dict(scale="1"), TypeError, "_forward] scale is '1': it must be a number"),
        "method": (
            lambda x: dict(method="flash"), ValueError,
            "_forward] method is 'flash': attention over lists has one; leave it empty, or name a candidate as force",
        ),
        "precision": (
            lambda x: dict(precision="tf32"), ValueError,
            "_forward] precision is not f32: attention over lists has no other",
        ),
        "mask": (
            lambda x: dict(mask=(x.blocks[0, :, 0, :1] > 9)), ValueError,
            "_forward] no candidate can serve this call; cpu: it takes no bias and no mask beside lists; "
            "reference: it runs only when it is asked for",
        ),
        "a flag": (lambda x: dict(return_lse="no"), TypeError, "] return_lse is 'no': it must be True or False"),
        "an option that is none": (lambda x: dict(colour=1), TypeError, "[attention] there is no option colour"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["torch", "numpy", "with gradient"])
@pytest.mark.parametrize("name", refusals())
def test_refusals(name, kind):
    change, error, words = refusals()[name]
    call = Call("counts", requires_grad=kind == "with gradient")
    given = {"blocks": call.blocks, "counts": call.counts, **call.lists, **change(call)}
    operands = call.q, call.k, call.v
    if kind == "numpy":
        given = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        operands = [x.numpy() for x in operands]
    with pytest.raises(error, match=re.escape(words)):
        heddle.sparse_attention(*operands, **given)


def test_lists_must_be_given():
    q, k, v = (getattr(Call("plain"), name) for name in "qkv")
    with pytest.raises(TypeError, match=r"^\[sparse_attention\] blocks is None: it must be a torch tensor$"):
        heddle.sparse_attention(q, k, v, None)
    with pytest.raises(ValueError, match=r"^\[sparse_attention_forward\] blocks is missing$"):
        heddle.sparse_attention(q.numpy(), k.numpy(), v.numpy(), None)


def test_refusals_of_results_and_gradients():
    call = Call("counts")

    def refused(words, error=ValueError, **given):
        with pytest.raises(error, match=re.escape(words)):
            call(**given)

    out, lse = (torch.empty_like(x) for x in call(return_lse=True))
    refused("[sparse_attention_forward] out is [2, 70, 4, 19]: its last extent must be 20", out=out[..., :19])
    refused("[sparse_attention_forward] lse_out is float16: it must be float32", lse_out=lse.half(), return_lse=True)
    refused("[sparse_attention] lse_out is given and return_lse is False: lse is written where it", lse_out=lse)
    refused("[sparse_attention] out is a ndarray: it must be a torch tensor", TypeError, out=out.numpy())
    held = torch.zeros(2 * 70 * 4 * 20, dtype=torch.int32)
    call.blocks = held[: call.blocks.numel()].reshape(call.blocks.shape)
    words = "[sparse_attention_forward] out shares memory with blocks, which is read while it is written"
    refused(words, out=held.view(torch.float32).reshape(2, 70, 4, 20))
    refused(
        "[sparse_attention] sink requires a gradient: a call that writes to out has no backward; make it under "
        "torch.no_grad(), or detach sink",
        out=out,
        sink=torch.zeros(H, requires_grad=True),
    )
    refused("[sparse_attention] out requires a gradient: a call that", out=out.clone().requires_grad_())
    operands, options = sample(Call("counts", requires_grad=True))
    with pytest.raises(ValueError, match=r"^\[sparse_attention_out\] q requires a gradient: this call has no backward"):
        OPS.sparse_attention_out(*operands, out, lse, *options)
    with pytest.raises(ValueError, match=r"\[sparse_attention\] out is given inside a transform of torch.func"):
        torch.func.vmap(lambda q: heddle.sparse_attention(q, call.k, call.v, call.blocks, out=out))(call.q[None])
    refused(
        "[sparse_attention] alibi_slopes requires a gradient: it has none",
        alibi_slopes=torch.ones(H, requires_grad=True),
    )
    q = call.q.requires_grad_()
    words = (
        "[sparse_attention_backward] no candidate can serve this call; cpu: it has no gradients with ALiBi or softcap; "
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        call(softcap=2.0).sum().backward()
    torch.autograd.grad(call(softcap=2.0, force="reference").sum(), q)
    (dq,) = torch.autograd.grad(call().square().sum(), q, create_graph=True)
    words = "heddle::sparse_attention_backward has no derivative: second derivatives are not supported"
    with pytest.raises(RuntimeError, match=words):
        dq.sum().backward()


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
