"""heddle.hosts.torch.activate on a GPU: torch's flash attention, served by Heddle, and given back."""

import inspect
import warnings

import heddle.hosts.torch
import pytest
import torch
from flash_kit import HEADS, KV_HEADS, LENGTHS, bounds, close, draw, native_calls, packed, packed_by_math
from heddle import _heddle
from heddle.hosts.torch import activation
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("this torch does not give its own kernels out", allow_module_level=True)
try:
    from torch.nn.attention import varlen
except ImportError:
    varlen = None

ATEN = torch.ops.aten
DTYPES = [(torch.bfloat16, 0.04), (torch.float16, 0.006)]
CU_Q, CU_K = (bounds(lengths, "cuda") for lengths in LENGTHS)
MAX_Q, MAX_K = map(max, LENGTHS)
BOTH = ["attention_forward", "attention_backward"]
WINDOWS = {"all": (-1, -1), "causal": (-1, 0), "window": (3, 0), "two sides": (2, 1), "wide": (-1, 50)}
needs_varlen = pytest.mark.skipif(varlen is None, reason="this torch has no torch.nn.attention.varlen")


@pytest.fixture
def calls(monkeypatch):
    with native_calls(monkeypatch) as seen:
        yield seen


def _operands(dtype=torch.bfloat16, rows=130, keys=130, head_size=64, kv_heads=KV_HEADS):
    shapes = (2, HEADS, rows, head_size), (2, kv_heads, keys, head_size), (2, kv_heads, keys, head_size)
    return [draw(s, i, "cuda", dtype).requires_grad_() for i, s in enumerate(shapes)]


def _attend(operands, backend=SDPBackend.FLASH_ATTENTION, **options):
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*operands, enable_gqa=True, **options)
    return out, torch.autograd.grad(out, operands, draw(out.shape, 7, "cuda", out.dtype))


def _by_math(operands, **options):
    exact = [x.detach().double().requires_grad_() for x in operands]
    return _attend(exact, SDPBackend.MATH, **options)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("head_size", [64, 128, 40, 44, 192, 256])  # 44: torch pads it
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(scale=0.3)], ids=str)
def test_sdpa(calls, options, head_size, dtype, bound):
    operands = _operands(dtype, head_size=head_size)
    with heddle.hosts.torch.activate():
        found, gradients = _attend(operands, **options)
    assert calls == BOTH
    expected, wanted = _by_math(operands, **options)
    close(found, expected, bound)
    for a, b in zip(gradients, wanted):
        close(a, b, bound)


@pytest.mark.parametrize("rows, keys", [(1, 300), (77, 300)])
def test_causal_lower_right(calls, rows, keys):
    """Which asks the operator for causality of lengths that differ."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = _operands(rows=rows, keys=keys, kv_heads=HEADS)
    mask = torch.ones(rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)
    expected, wanted = _by_math((q, k, v), attn_mask=mask)
    with heddle.hosts.torch.activate():
        out = scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(rows, keys))
        gradients = torch.autograd.grad(out, (q, k, v), draw(out.shape, 7, "cuda", out.dtype))
    assert calls == BOTH
    close(out, expected, 0.04)
    for a, b in zip(gradients, wanted):
        close(a, b, 0.04)


@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp_and_either_backward_after_either_forward(calls, causal):
    q, k, v = (x.detach() for x in _operands())
    own = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    with heddle.hosts.torch.activate():
        ours = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    assert len(ours) == len(own) and calls == ["attention_forward"]
    close(ours[1], own[1], 1e-3)
    for a, b in zip(ours, own):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        else:
            assert a == b
    d_o = draw(q.shape, 7, "cuda", q.dtype)

    def backward(saved):
        out, lse, cu_q, cu_k, max_q, max_k, state, unused, _ = saved
        rest = (out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, state, unused)
        return ATEN._scaled_dot_product_flash_attention_backward(d_o, q, k, v, *rest)

    wanted = backward(own)
    with heddle.hosts.torch.activate():
        mixed = backward(own)
    assert calls == BOTH
    for other in (mixed, backward(ours)):
        for a, b in zip(other, wanted):
            close(a, b, 0.04)
    assert calls == BOTH


@needs_varlen
@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_varlen(calls, window, dtype, bound):
    operands = packed("cuda", dtype, 64)
    sizes = (CU_Q, CU_K, MAX_Q, MAX_K)
    takes = inspect.signature(varlen.varlen_attn).parameters  # earlier torches say is_causal alone
    options = dict(return_aux=varlen.AuxRequest(lse=True))
    if "window_size" in takes:
        options["window_size"] = window
    elif window in ((-1, -1), (-1, 0)):
        options["is_causal"] = window[1] == 0
    else:
        pytest.skip("this torch's varlen_attn has no window_size")
    if "enable_gqa" in takes:
        options["enable_gqa"] = True
    else:
        repeated = [x.detach().repeat_interleave(HEADS // x.shape[1], 1) for x in operands]
        operands = [x.requires_grad_() for x in repeated]
    own = varlen.varlen_attn(*operands, *sizes, **options)
    with heddle.hosts.torch.activate():
        out, lse = varlen.varlen_attn(*operands, *sizes, **options)
        d_o = draw(out.shape, 7, "cuda", dtype)
        gradients = torch.autograd.grad(out, operands, d_o)
    assert calls == BOTH
    close(lse, own[1], 1e-3)  # also where a row meets no key
    close(out, own[0], bound)
    exact = [x.detach().double().requires_grad_() for x in operands]
    window = (-1, -1) if window[1] >= MAX_K else window
    expected, _ = packed_by_math(*exact, window=window)
    close(out, expected, bound)
    for a, b in zip(gradients, torch.autograd.grad(expected, exact, d_o.double())):
        close(a, b, bound)


def test_packed_operator(calls):
    """What varlen_attn and jagged tensors call, whatever torch's varlen_attn takes."""
    operands = packed("cuda", torch.bfloat16, 64)
    arguments = (*operands, CU_Q, CU_K, MAX_Q, MAX_K, 0.0, True, False)
    own = ATEN._flash_attention_forward(*arguments)
    with heddle.hosts.torch.activate():
        found = ATEN._flash_attention_forward(*arguments)
        d_o = draw(found[0].shape, 7, "cuda", torch.bfloat16)
        gradients = torch.autograd.grad(found[0], operands, d_o)
    assert calls == BOTH
    for a, b in zip(found, own):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
    close(found[1], own[1], 1e-3)
    for a, b in zip(gradients, torch.autograd.grad(own[0], operands, d_o)):
        close(a, b, 0.04)


def _schema_has(name, argument):
    return hasattr(ATEN, name) and argument in [a.name for a in getattr(ATEN, name).default._schema.arguments]


def test_used_lengths(calls):
    q, k, v = packed("cuda", torch.bfloat16, 64, requires_grad=False)
    used = torch.tensor([5, 0, 12, 3], dtype=torch.int32, device="cuda")
    arguments = (q, k, v, CU_Q, CU_K, MAX_Q, MAX_K, 0.0, True, False)
    with heddle.hosts.torch.activate():
        out, lse, *_ = ATEN._flash_attention_forward(*arguments, seqused_k=used)
    assert calls == ["attention_forward"]
    expected, expected_lse = packed_by_math(q, k, v, used=used.tolist(), window=(-1, 0))
    close(out, expected, 0.04)
    close(lse, expected_lse, 0.01)


def test_alibi(calls):
    """A causal call is torch's own, whose published builds have no ALiBi."""
    operands = [x.detach() for x in _operands()]
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], device="cuda")
    at = torch.arange(130, device="cuda")
    bias = -slopes[:, None, None].double() * (at[:, None] - at).abs()
    expected, _ = _by_math(operands, attn_mask=bias)

    def forward(causal):
        sizes = (None, None, 130, 130, 0.0, causal, False)
        return ATEN._flash_attention_forward(*(x.transpose(1, 2) for x in operands), *sizes, alibi_slopes=slopes)

    def outcome(causal):
        try:
            return forward(causal)[0]
        except RuntimeError as error:
            return str(error)

    own = outcome(True)
    with heddle.hosts.torch.activate():
        assert type(outcome(True)) is type(own)
        assert calls == []
        found = forward(False)
    assert calls == ["attention_forward"]
    close(found[0].transpose(1, 2), expected, 0.04)


@pytest.mark.skipif(
    not _schema_has("_flash_attention_forward", "block_table"), reason="this torch's operator takes no pages"
)
@pytest.mark.parametrize("page", [256, 16])  # torch's own takes multiples of 256
def test_pages(calls, page):
    keys, sequences = 700, 2
    q = draw((sequences * 3, HEADS, 64), 0, "cuda", torch.bfloat16)
    k, v = (draw((sequences * keys, KV_HEADS, 64), i, "cuda", torch.bfloat16) for i in (1, 2))
    count = -(-keys // page)
    table = torch.arange(sequences * count, dtype=torch.int32, device="cuda").flip(0).reshape(sequences, count)
    pages = []
    for x in (k, v):
        x = torch.nn.functional.pad(x.view(sequences, keys, -1), (0, 0, 0, count * page - keys))
        pages.append(torch.empty(sequences * count, page, KV_HEADS, 64, dtype=x.dtype, device="cuda"))
        pages[-1][table.flatten().long()] = x.reshape(sequences * count, page, KV_HEADS, 64)
    cu_q, cu_k = bounds([3] * sequences, "cuda"), bounds([keys] * sequences, "cuda")
    used = torch.tensor([keys, 301], dtype=torch.int32, device="cuda")
    arguments = (q, *pages, cu_q, cu_k, 3, keys, 0.0, True, False)
    with heddle.hosts.torch.activate():
        out, lse, *_ = ATEN._flash_attention_forward(*arguments, seqused_k=used, block_table=table)
        into = torch.empty_like(q)
        ATEN._flash_attention_forward_no_dropout_inplace(into, *arguments, seqused_k=used, block_table=table)
    assert calls == ["attention_forward"] * 2 and torch.equal(out, into)
    k, v = (x.view(sequences, keys, KV_HEADS, 64) for x in (k, v))
    for b, n in enumerate(used.tolist()):
        mask = torch.ones(3, n, dtype=torch.bool, device="cuda").tril(n - 3)
        expected, _ = _by_math(
            [x.transpose(0, 1)[None] for x in (q[3 * b : 3 * b + 3], k[b, :n], v[b, :n])], attn_mask=mask
        )
        close(out[3 * b : 3 * b + 3].transpose(0, 1)[None], expected, 0.04)


def test_jagged_tensors(calls):
    parts = [[draw((n, HEADS, 64), i, "cuda", torch.bfloat16) for n in (70, 3, 129)] for i in range(3)]
    operands = [torch.nested.nested_tensor(x, layout=torch.jagged, requires_grad=True) for x in parts]

    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in operands)).transpose(1, 2)
            d_o = draw(out.values().shape, 7, "cuda", torch.bfloat16)
            return out.values(), [x.values() for x in torch.autograd.grad(out.values(), operands, d_o)]

    expected, wanted = run()
    assert calls == []
    with heddle.hosts.torch.activate():
        found, gradients = run()
    assert calls == BOTH
    close(found, expected, 0.04)
    for a, b in zip(gradients, wanted):
        close(a, b, 0.04)


def test_dropout_goes_on_as_before(calls):
    operands = _operands()

    def run():
        torch.manual_seed(0)
        return _attend(operands, dropout_p=0.5)

    expected, wanted = run()
    with heddle.hosts.torch.activate():
        found, gradients = run()
    assert calls == []
    assert torch.equal(found, expected)
    for a, b in zip(gradients, wanted):
        close(a, b, 0.02)  # torch's sums of dq are in no fixed order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_never_gets_there_goes_on_as_before(calls, dtype):
    operands = _operands(dtype)
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    expected, _ = _attend(operands, backends)
    with heddle.hosts.torch.activate():
        found, _ = _attend(operands, backends)
    assert calls == [] and torch.equal(found, expected)


def test_mixed_dtypes_are_refused_in_torchs_words(calls):
    q, k, v = (x.detach() for x in _operands())

    def words():
        with pytest.raises(RuntimeError) as caught:
            ATEN._scaled_dot_product_flash_attention(q, k.half(), v)
        return str(caught.value).splitlines()[0]

    expected = words()
    with heddle.hosts.torch.activate():
        assert words() == expected
    assert calls == []


def test_gives_torchs_own_back_to_the_bit(calls):
    operands = _operands()
    before, _ = _attend(operands)
    with heddle.hosts.torch.activate() as outer:
        heddle.hosts.torch.activate().deactivate()
        _attend(operands)
        assert calls == BOTH
        outer.deactivate()
        assert torch.equal(_attend(operands)[0], before)
    assert calls == BOTH
    for name in activation.FLASH:
        if hasattr(ATEN, name):
            assert "heddle" not in torch._C._dispatch_dump(f"aten::{name}")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_under_a_compiler(calls, backend):
    if backend == "inductor":
        pytest.importorskip("triton")
    operands = _operands()
    expected, wanted = _by_math(operands, is_causal=True)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) * 1.0,
        fullgraph=True,
        backend=backend,
    )
    with heddle.hosts.torch.activate(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = compiled(*operands)
        gradients = torch.autograd.grad(found, operands, draw(found.shape, 7, "cuda", found.dtype))
    assert calls == BOTH
    close(found, expected, 0.04)
    for a, b in zip(gradients, wanted):
        close(a, b, 0.04)


def test_in_a_cuda_graph(calls):
    q, k, v = (x.detach() for x in _operands())
    with heddle.hosts.torch.activate(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    q.copy_(q.flip(2))
    graph.replay()
    close(out, _by_math([x.requires_grad_() for x in (q, k, v)], is_causal=True)[0], 0.04)
    assert calls == ["attention_forward"] * 2


def test_under_autocast_in_a_model(calls):
    torch.manual_seed(5)
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True).cuda()
    x = torch.randn(2, 33, 64, device="cuda")

    def run():
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out, _ = attention(x, x, x, need_weights=False)
        return out, torch.autograd.grad(out.float().square().sum(), list(attention.parameters()))

    expected, wanted = run()
    with heddle.hosts.torch.activate():
        found, gradients = run()
    assert calls == BOTH
    close(found, expected, 0.04)
    for a, b in zip(gradients, wanted):
        close(a, b, 0.04)


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"), reason="this torch has no such hook"
)
def test_by_torchs_flash_hook(calls):
    operands = _operands()
    before, _ = _attend(operands)
    torch.nn.attention.activate_flash_attention_impl("heddle")
    try:
        assert torch.nn.attention.current_flash_attention_impl() == "heddle"
        _attend(operands)
        assert calls == BOTH
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert torch.equal(_attend(operands)[0], before) and calls == BOTH
