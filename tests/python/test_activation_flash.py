"""torch's operators of flash attention by Heddle: as functions of tensors on the CPU, and as torch.nn.attention.varlen calls
them there. tests/python/test_cuda_activation.py has them on a GPU."""

import inspect
import threading

import heddle.hosts.torch
import pytest
import torch
from flash_kit import (
    HEADS,
    KV_HEADS,
    LENGTHS,
    bounds,
    by_math,
    close,
    draw,
    native_calls,
    packed,
    packed_by_math,
)
from heddle.hosts.torch import activation, flash_operators
from heddle.hosts.torch.flash_operators import FLASH, NotServed
from torch._subclasses.fake_tensor import FakeTensorMode

if not hasattr(torch.library, "get_kernel"):
    pytest.skip("this torch does not give its own kernels out", allow_module_level=True)
varlen = pytest.importorskip("torch.nn.attention.varlen")

ATEN = torch.ops.aten
CU_Q, CU_K = map(bounds, LENGTHS)
MAX_Q, MAX_K = map(max, LENGTHS)
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 0.04)]
WINDOWS = {"all": (-1, -1), "causal": (-1, 0), "window": (3, 0), "two sides": (2, 1), "wide": (-1, 50)}


@pytest.fixture
def calls(monkeypatch):
    with native_calls(monkeypatch) as seen:
        yield seen


def _varlen(operands, **options):
    aux = varlen.AuxRequest(lse=True)
    return varlen.varlen_attn(*operands, CU_Q, CU_K, MAX_Q, MAX_K, return_aux=aux, enable_gqa=True, **options)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_varlen(calls, window, dtype, bound):
    operands = packed(dtype=dtype)
    with heddle.hosts.torch.activate():
        out, lse = _varlen(operands, window_size=window, scale=0.3)
        weight = draw(out.shape, 7, dtype=dtype)
        gradients = torch.autograd.grad(out, operands, weight)
    assert calls == ["attention_forward", "attention_backward"]
    exact = [x.detach().double().requires_grad_() for x in operands]
    window = (-1, -1) if window[1] >= MAX_K else window
    expected, expected_lse = packed_by_math(*exact, window=window, scale=0.3)
    close(out, expected, bound)
    close(lse, expected_lse, bound)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, exact, weight.double())):
        close(found, wanted, bound)


def test_varlen_writes_and_reads_pages(calls):
    q, k, v = packed(requires_grad=False)
    used = torch.tensor([5, 0, 12, 3], dtype=torch.int32)
    out = torch.full_like(q, torch.nan)
    expected, lse = packed_by_math(q, k, v, used=used.tolist(), window=(-1, 0))
    page = 4
    table = torch.arange(12, dtype=torch.int32).flip(0).reshape(4, 3)
    pages = [torch.full((12, page, KV_HEADS, 16), torch.nan) for _ in "kv"]
    for into, x in zip(pages, (k, v)):
        for sequence, part in enumerate(x.split(LENGTHS[1])):
            for i, row in enumerate(part):
                into[table[sequence, i // page], i % page] = row
    options = dict(window_size=(-1, 0), enable_gqa=True, return_aux=varlen.AuxRequest(lse=True), seqused_k=used)
    with heddle.hosts.torch.activate():
        written = varlen.varlen_attn_out(out, q, k, v, CU_Q, CU_K, MAX_Q, MAX_K, **options)
        for cu_k in (CU_K, None):
            found = varlen.varlen_attn(q, *pages, CU_Q, cu_k, MAX_Q, 12, block_table=table, num_splits=1, **options)
            close(found[0], expected, 1e-5)
            close(found[1], lse, 1e-5)
    assert written[0] is out
    close(out, expected, 1e-5)
    close(written[1], lse, 1e-5)
    assert calls == ["attention_forward"] * 3


def test_pages_are_as_long_as_the_bounds_say_without_used_lengths():
    q, k, v = (x[:, None] for x in packed(requires_grad=False))  # a page for each key
    table = torch.zeros(4, 12, dtype=torch.int32)
    for sequence, length in enumerate(LENGTHS[1]):
        table[sequence, :length] = torch.arange(length) + CU_K[sequence]
    arguments = (q[:, 0], k, v, CU_Q, CU_K, MAX_Q, MAX_K, 0.0, False, False)
    out, lse, *_ = flash_operators.flash_attention_forward(*arguments, block_table=table)
    expected = packed_by_math(q[:, 0], k[:, 0], v[:, 0])
    close(out, expected[0], 1e-5)
    close(lse, expected[1], 1e-5)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("rows, keys", [(9, 9), (5, 9), (9, 5), (1, 9)])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_operators(causal, rows, keys, dtype, bound):
    """bottom-right where lengths differ: what torch.nn.attention.bias.causal_lower_right asks the operator for."""
    shapes = [(2, HEADS, rows, 16)] + [(2, KV_HEADS, keys, 16)] * 2
    q, k, v = (draw(s, i, dtype=dtype) for i, s in enumerate(shapes))
    found = flash_operators.sdpa_forward(q, k, v, 0.0, causal, scale=0.4)
    out, lse, cu_q, cu_k, max_q, max_k, rng_state, unused, debug = found
    assert (cu_q, cu_k, max_q, max_k) == (None, None, rows, keys)
    assert lse.is_contiguous() and out.stride() == q.stride()
    d_o = draw(out.shape, 7, dtype=dtype)
    saved = (q, k, v, out, lse, None, None, rows, keys, 0.0, causal, rng_state, unused)
    gradients = flash_operators.sdpa_backward(d_o, *saved, scale=0.4)
    # The same of [B, S, H, D].
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    dense, dense_lse, *_ = flash_operators.flash_attention_forward(
        *turned, None, None, rows, keys, 0.0, causal, False, scale=0.4
    )
    assert torch.equal(dense.transpose(1, 2), out) and torch.equal(lse, dense_lse)
    saved = (*turned, dense, lse, None, None, rows, keys, 0.0, causal, rng_state, unused)
    for a, b in zip(flash_operators.flash_attention_backward(d_o.transpose(1, 2), *saved, scale=0.4), gradients):
        close(a.transpose(1, 2), b, 0.0)
    for i in range(2):
        exact = [x[i].double().transpose(0, 1).requires_grad_() for x in (q, k, v)]
        expected, expected_lse = by_math(*exact, causal=causal, scale=0.4)
        close(out[i].transpose(0, 1), expected, bound)
        close(lse[i], expected_lse, bound)
        wanted = torch.autograd.grad(expected, exact, d_o[i].double().transpose(0, 1))
        for a, b in zip(gradients, wanted):
            close(a[i].transpose(0, 1), b, bound)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi(causal):
    q, k, v = packed(requires_grad=False)
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
    arguments = (q, k, v, CU_Q, CU_K, MAX_Q, MAX_K, 0.0, causal, False)
    out, lse, *_ = flash_operators.flash_attention_forward(*arguments, alibi_slopes=slopes)
    expected = packed_by_math(q, k, v, causal=causal, slopes=slopes)
    close(out, expected[0], 1e-5)
    close(lse, expected[1], 1e-5)


@pytest.mark.parametrize("name", FLASH)
def test_answers_are_of_the_forms_that_torch_expects(name):
    """What torch says of each operator's results while it traces."""
    if not hasattr(ATEN, name):
        pytest.skip("this torch has no such operator")
    q, k, v = (draw((2, n, 9, 16), n, dtype=torch.bfloat16).transpose(1, 2) for n in (HEADS, KV_HEADS, KV_HEADS))
    if name.startswith("_scaled"):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.empty_like(q), torch.empty(2, HEADS, 9)
    state = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    sizes = (None, None, 9, 9, 0.0, True)
    arguments = {
        "_flash_attention_forward": (q, k, v, *sizes, False),
        "_flash_attention_forward_no_dropout_inplace": (out, q, k, v, *sizes, False),
        "_scaled_dot_product_flash_attention": (q, k, v, 0.0, True),
    }.get(name, (out, q, k, v, out, lse, *sizes, *state))
    found = FLASH[name](*arguments)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    expected = getattr(ATEN, name).default(*meta)
    found, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (found, expected))
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        else:
            assert a == b


@pytest.mark.parametrize("name", FLASH)
def test_arguments_are_those_of_the_schema(name):
    if not hasattr(ATEN, name):
        pytest.skip("this torch has no such operator")
    wanted = [argument.name for argument in getattr(ATEN, name).default._schema.arguments]
    function = flash_operators._attend if "forward" in name else FLASH[name]
    if name.endswith("attention_backward") and name.startswith("_scaled"):
        function = flash_operators.flash_attention_backward
        wanted = ["rng_state" if x == "philox_seed" else "unused" if x == "philox_offset" else x for x in wanted]
    taken = list(inspect.signature(function).parameters)
    if name == "_flash_attention_forward":
        wanted = ["out", *wanted]
    short = {"query": "q", "key": "k", "value": "v"} if function is flash_operators._attend else {}
    assert [short.get(x, x) for x in wanted] == taken[: len(wanted)]


def _asked(dtype=torch.float32, head_size=16, dense=False, **changes):
    """Arguments of aten::_flash_attention_forward, those before dropout_p and the others."""
    q, k, v = packed(dtype=dtype, head_size=head_size, requires_grad=False)
    if dense:
        q, k, v = q[None], k[None], v[None]
    options = dict(dropout_p=0.0, is_causal=False, return_debug_mask=False) | changes
    return (q, k, v, *((None, None) if dense else (CU_Q, CU_K)), MAX_Q, MAX_K), options


CASES = {
    "dropout": (dict(dropout_p=0.25), "dropout_p is 0.25"),
    "float64": (dict(dtype=torch.float64), "query is torch.float64"),
    "head size": (dict(head_size=264), "query has head size 264"),
    "probabilities": (dict(return_debug_mask=True), "return_debug_mask is True"),
    "used lengths of dense": (dict(dense=True, seqused_k=CU_K[1:]), "seqused_k or block_table"),
    "what a later torch may have": (dict(softcap=30.0), "softcap is given"),
    "what the native module refuses": (dict(seqused_k=CU_K[1:].long()), "seqused_k is int64"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_for_torchs_own_kernel(case):
    changes, words = CASES[case]
    arguments, options = _asked(**changes)
    with pytest.raises(NotServed, match=words):
        flash_operators.flash_attention_forward(*arguments, **options)


def test_an_unserved_call_reaches_torchs_kernel_and_what_it_returns_comes_back(monkeypatch):
    """As on a GPU, where torch has kernels of its own: by one that stands in for those here."""
    own = torch.library.Library("aten", "IMPL")
    seen = []

    def torchs(q, k, v, *arguments, **named):
        seen.append((arguments[4], named))
        return q + 1, *(q.new_zeros(()) for _ in range(4))

    own.impl("_flash_attention_forward", torchs, "CPU")
    try:
        arguments, _ = _asked()
        before = ATEN._flash_attention_forward(*arguments, 0.5, False, False, scale=0.5)[0]
        with heddle.hosts.torch.activate():
            dropped = ATEN._flash_attention_forward(*arguments, 0.5, False, False, scale=0.5)[0]
            served = ATEN._flash_attention_forward(*arguments, 0.0, False, False, scale=0.5)[0]
        after = ATEN._flash_attention_forward(*arguments, 0.0, False, False, scale=0.5)[0]
    finally:
        own._destroy()
    assert torch.equal(dropped, before) and torch.equal(after, before) and not torch.equal(served, before)
    assert seen == [(0.5, {"scale": 0.5}), (0.5, {"scale": 0.5}), (0.0, {"scale": 0.5})]


def test_without_torchs_own_kernel_says_what_is_not_served():
    q, k, v = packed(requires_grad=False)
    with heddle.hosts.torch.activate():
        words = (
            r"\[_flash_attention_forward\] query is torch.float64: Heddle does not serve that, and torch has no kernel"
        )
        with pytest.raises(NotImplementedError, match=words):
            _varlen([x.double() for x in (q, k, v)])
        with pytest.raises(ValueError, match=r"\[attention_forward\] seqused_k is int64"):
            _varlen((q, k, v), seqused_k=CU_K[1:].long())
    with pytest.raises(NotImplementedError, match="Could not run"):
        _varlen((q, k, v))


def test_under_a_compiler(calls):
    operands = packed()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: _varlen(x, window_size=(-1, 0))[0] * 1.0, fullgraph=True, backend="aot_eager")
    with heddle.hosts.torch.activate():
        out = compiled(*operands)
        gradients = torch.autograd.grad(out.square().sum(), operands)
    assert calls == ["attention_forward", "attention_backward"]
    exact = [x.detach().double().requires_grad_() for x in operands]
    expected, _ = packed_by_math(*exact, window=(-1, 0))
    close(out, expected, 1e-5)
    for found, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), exact)):
        close(found, wanted, 1e-5)


def test_on_torch_without_gpus_kernels_for_them_come_and_go():
    """A GPU's tensors reach them there alone; registering and removing leaves every operator as it was."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has GPU kernels")
    before = {name: torch._C._dispatch_dump(f"aten::{name}") for name in FLASH if hasattr(ATEN, name)}
    library = activation.install("CUDA")
    during = {name: torch._C._dispatch_dump(f"aten::{name}") for name in before}
    library._destroy()
    assert all("CUDA: registered" in x for x in during.values())
    assert {name: torch._C._dispatch_dump(f"aten::{name}") for name in before} == before
    # activate() leaves them alone.
    with heddle.hosts.torch.activate():
        assert "CUDA: registered" not in torch._C._dispatch_dump("aten::_flash_attention_forward")


def test_torchs_flash_hook_knows_the_name():
    attention = torch.nn.attention
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this torch has no such hook")
    assert "heddle" in attention.list_flash_attention_impls()
    if not activation.serves_gpus():
        with pytest.raises(RuntimeError, match=r"has no GPU kernels, which torch's flash hook is for"):
            attention.activate_flash_attention_impl("heddle")


def test_from_many_threads():
    operands = packed(requires_grad=False)
    expected = packed_by_math(*operands)[0]
    failures = []

    def work():
        try:
            for _ in range(5):
                with heddle.hosts.torch.activate():
                    close(_varlen(operands)[0], expected, 1e-5)
        except Exception as error:  # of a thread, for the test to raise
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with pytest.raises(NotImplementedError):
        _varlen(operands)


def test_what_an_earlier_call_left_behind_is_no_refusal(monkeypatch):
    """native() raises it in place of the call, and torch's own kernel would hide it."""

    def native(function, *arguments):
        raise ValueError("[attention_forward] cu_seqlens_q[0] is 1: it must be 0")

    monkeypatch.setattr(flash_operators, "native", native)
    arguments, options = _asked()
    with pytest.raises(ValueError, match="cu_seqlens_q.0. is 1"):
        flash_operators.flash_attention_forward(*arguments, **options)


@pytest.mark.parametrize(
    "dtype, changes, words",
    [
        (torch.float32, {}, "query is torch.float32 on a GPU"),
        (torch.bfloat16, dict(is_causal=True, alibi_slopes=torch.ones(HEADS)), "alibi_slopes is given"),
    ],
)
def test_what_is_for_torchs_own_kernel_on_a_gpu(dtype, changes, words):
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 9, HEADS, 16, dtype=dtype, device="cuda")
        options = dict(dropout_p=0.0, is_causal=False, return_debug_mask=False) | changes
        with pytest.raises(NotServed, match=words):
            flash_operators.flash_attention_forward(q, q, q, None, None, 9, 9, **options)
