"""torch tensors on a GPU: results, streams, memory, tracing, and what is refused."""

import heddle
import pytest
import torch
from heddle import _heddle
from heddle._options import pack
from kit import assert_accurate, attending, in_orders, plain

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

HALF = {"f16": torch.float16, "bf16": torch.bfloat16}
DTYPES = {**HALF, "f32": torch.float32}


def inputs(b=2, h=4, hkv=None, sq=96, sk=None, d=64, dv=None, dtype=torch.bfloat16, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = (b, sq, h, d), (b, sk or sq, hkv or h, d), (b, sk or sq, hkv or h, dv or d)
    return [torch.randn(shape, generator=random).to("cuda", dtype) for shape in shapes]


def check(out, lse, tensors, **options):
    host = [x.cpu() for x in tensors]
    exact, exact_lse = plain(*(x.double() for x in host), **options)
    rough, rough_lse = in_orders(lambda order: plain(*host, order=order, **options))
    assert_accurate("out", out.cpu(), exact, rough, out.dtype, attending(exact_lse))
    assert_accurate("lse", lse.cpu(), exact_lse, rough_lse, lse.dtype, attending(exact_lse))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(),
        dict(b=1, h=3, sq=1, sk=33),
        dict(h=8, hkv=2, sq=70, sk=130, d=128),
        dict(d=96, dv=32),
        dict(b=1, sq=257, d=256),
        dict(sk=5),
    ],
)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_matches_plain(name, sizes, causal):
    tensors = inputs(dtype=DTYPES[name], **sizes)
    out, lse = heddle.attention(*tensors, causal=causal, return_lse=True)
    assert out.device == tensors[0].device and lse.device == out.device and lse.dtype == torch.float32
    check(out, lse, tensors, causal=causal)
    assert torch.equal(heddle.attention(*tensors, causal=causal), out)


def test_precision_of_float32():
    tensors = inputs(dtype=torch.float32, sq=500)
    exact = plain(*(x.cpu().double() for x in tensors))[0]

    def error(**options):
        return ((heddle.attention(*tensors, **options).cpu().double() - exact).norm() / exact.norm()).item()

    assert error() == error(precision="f32") < 1e-6
    assert 1e-5 < error(precision="tf32") < 2e-3


def in_int8(q, k):
    """What the codes of q and k stand for: a scale for each row of q, and for each group of 16 keys less their mean."""
    q_scale = q.abs().amax(-1, keepdim=True) / 127
    k = k - k.mean(1, keepdim=True)
    group = torch.arange(k.shape[1]) // 64 * 4 + torch.arange(k.shape[1]) // 2 % 4
    for g in group.unique():
        scale = k[:, group == g].abs().amax((1, 3), keepdim=True) / 127
        k[:, group == g] = (k[:, group == g] / scale).round() * scale
    return (q / q_scale).round() * q_scale, k


@pytest.mark.parametrize("offset", [0, 60])
def test_precision_int8_qk(offset):
    q, k, v = inputs(h=8, hkv=2, sq=500, d=128)
    k = k + offset * torch.randn(128, device="cuda").sign().bfloat16()
    wide = [x.cpu().double() for x in (q, k, v)]
    exact, exact_lse = plain(*wide)
    rough = plain(*in_int8(*wide[:2]), wide[2])[0]
    out, lse = heddle.attention(q, k, v, precision="int8_qk", return_lse=True)
    assert out.dtype == q.dtype and not torch.equal(out, heddle.attention(q, k, v))
    error, allowed = ((x.double() - exact).abs().max().item() for x in (out.cpu(), rough))
    assert error <= 2 * allowed + 2**-8 * exact.abs().max().item()
    shift = wide[1].mean(1, keepdim=True)
    _, smooth_lse = plain(wide[0], wide[1] - shift, wide[2])
    _, rough_lse = plain(*in_int8(*wide[:2]), wide[2])
    assert (lse.cpu().double() - exact_lse).abs().max() <= 2 * (rough_lse - smooth_lse).abs().max() + 1e-3


def test_int8_qk_is_asked_for_and_forward_only():
    q, k, v = inputs()
    chosen = heddle.explain(q, k, v, precision="int8_qk").chosen
    assert chosen.name == "sm80_int8"
    assert heddle.explain(q, k, v).chosen.name != "sm80_int8"
    with pytest.raises(ValueError, match="sm80_int8: it has no softcap"):
        heddle.attention(q, k, v, precision="int8_qk", softcap=3.0)
    with pytest.raises(
        ValueError, match="force is 'sm80_int8', .* it multiplies q and k in 8 bits, which precision int8_qk asks for"
    ):
        heddle.attention(q, k, v, force="sm80_int8")
    with pytest.raises(ValueError, match="precision is int8_qk, which has no backward"):
        heddle.attention(q.requires_grad_(), k, v, precision="int8_qk").sum().backward()


def test_sdpa_and_strides():
    q, k, v = (x.transpose(1, 2) for x in inputs())
    assert torch.equal(heddle.sdpa(q, k, v), heddle.attention(*inputs()).transpose(1, 2))
    wide = torch.zeros(2, 96, 4, 192, device="cuda", dtype=torch.bfloat16)
    parts = wide.split(64, dim=-1)
    for part, x in zip(parts, inputs()):
        part.copy_(x)
    assert torch.equal(heddle.attention(*parts), heddle.attention(*inputs()))


def test_explain_names_the_candidate_of_the_gpu():
    chosen = heddle.explain(*inputs()).chosen
    assert chosen is not None
    assert not any(c.supported for c in heddle.explain(*inputs()) if c.name in ("cpu", "baseline", "reference"))
    out = heddle.attention(*inputs(), force=chosen.name)
    assert torch.equal(out, heddle.attention(*inputs()))


@pytest.mark.parametrize(
    "shapes", [((2, 70, 8), (2, 1, 2), (1, 1, 2)), ((2, 70, 8), (2, 600, 2), (2, 600, 1))], ids=["heads", "tokens"]
)
def test_float8_with_scales(shapes):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel for float8_e4m3fn is Hopper's")
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(h=8, hkv=2, sq=70, sk=600, d=128))
    scales = [0.5 + torch.rand(shape, device="cuda") for shape in shapes]
    options = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
    out, lse = heddle.attention(q, k, v, return_lse=True, force="sm90_fp8", **options)
    assert out.dtype == torch.bfloat16 and heddle.explain(q, k, v, **options).chosen.name == "sm90_fp8"
    q, k, v = ((x.double() * s[..., None]).transpose(1, 2) for x, s in zip((q, k, v), scales))
    k, v = (x.repeat_interleave(4, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / 128**0.5
    p = scores.softmax(-1)
    exact = (p @ v).transpose(1, 2)
    rough = ((p * 256).float().to(torch.float8_e4m3fn).double() / 256 @ v).transpose(1, 2)
    terms = (q.abs() @ k.abs().transpose(2, 3) / 128**0.5).max().item()  # of sums that are cut off after 14 bits
    error, allowed = ((x.double() - exact).abs().max().item() for x in (out, rough))
    assert error <= 2 * allowed + 2**-9 * exact.abs().max().item()
    assert (lse.double() - scores.logsumexp(-1)).abs().max().item() <= 2**-11 * terms


def test_runs_on_the_current_stream():
    """The copy into q is held up on a side stream: only a call on that stream comes after it."""
    q, k, v = inputs()
    expected = heddle.attention(q, k, v)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        out = heddle.attention(late, k, v)
        operator = torch.ops.heddle.attention_forward(late, k, v, *pack())[0]
    side.synchronize()
    assert torch.equal(out, expected) and torch.equal(operator, expected)


def test_allocates_what_it_asks_for_from_torch():
    def allocations(**options):
        tensors = inputs(b=1, sq=2304)
        heddle.attention(*tensors, **options)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out = heddle.attention(*tensors, **options)
        assert out.shape == tensors[0].shape
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    for causal in ("none", "bottom_right"):
        workspace = heddle.explain(*inputs(b=1, sq=2304), causal=causal).chosen.workspace
        assert allocations(causal=causal) == 1 + (workspace > 0)


@pytest.mark.parametrize("causal, sq", [("none", 96), ("bottom_right", 2304)])
def test_capture_into_a_graph(causal, sq):
    tensors = inputs(b=1, sq=sq)
    other = inputs(b=1, sq=sq, seed=1)
    expected = heddle.attention(*other, causal=causal)
    heddle.attention(*tensors, causal=causal)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = heddle.attention(*tensors, causal=causal)
    for x, new in zip(tensors, other):
        x.copy_(new)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_traced_by_torch_compile():
    def double(q, k, v):
        return heddle.attention(q, k, v, causal="top_left") * 2

    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs()), double(*inputs()))


def test_operator_is_registered_well():
    torch.library.opcheck(
        torch.ops.heddle.attention_forward.default,
        (*inputs(), *pack()),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_gradients():
    """As on the CPU where a candidate has them, and refused with the candidates' sentences where none has."""
    tensors = [x.requires_grad_() for x in inputs()]
    out = heddle.attention(*tensors)
    assert out.requires_grad
    if heddle.explain(*tensors, backward=True).chosen is None:
        with pytest.raises(ValueError, match="no candidate can serve this call; cpu: it runs on another device"):
            out.float().sum().backward()
        return
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to("cuda", out.dtype)
    out.backward(weight)

    def gradients(order="forward", dtype=None):
        leaves = [x.detach().cpu().to(dtype or x.dtype).requires_grad_() for x in tensors]
        out = plain(*leaves, order=order)[0]
        return torch.autograd.grad(out, leaves, weight.cpu().to(out.dtype))

    for name, x, exact, rough in zip(("dq", "dk", "dv"), tensors, gradients(dtype=torch.float64), in_orders(gradients)):
        assert_accurate(name, x.grad.cpu(), exact, rough, x.dtype)


def test_refusals():
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"\[attention_forward\] k is on another device than q"):
        heddle.attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match=r"\[attention_forward\] k is on another device than q"):
        heddle.attention(q.cpu(), k, v)
    with pytest.raises(ValueError, match=r"\[attention_forward\] sink is on another device than q"):
        heddle.attention(q, k, v, sink=torch.zeros(4))
    with pytest.raises(ValueError, match="q is float64: it must be float32, float16 or bfloat16"):
        heddle.attention(q.double(), k.double(), v.double())
    with pytest.raises(
        ValueError, match="force is 'reference', which cannot serve this call: it runs on another device"
    ):
        heddle.attention(q, k, v, force="reference")
    cu = torch.tensor([0, 96], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="max_seqlen_q is 0: cu_seqlens_q is on a GPU, where lengths are not read"):
        heddle.attention(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu)
    table = torch.ones(96, 32)
    with pytest.raises(ValueError, match=r"\[apply_rotary\] cos is on another device than x"):
        heddle.apply_rotary(q, table, table)
    with pytest.raises(ValueError, match=r"\[append_kv_cache\] seqlens is on another device than k_new"):
        heddle.append_kv_cache(k, v, k.clone(), v.clone(), torch.zeros(2, dtype=torch.int32))


def angles(positions=256, half=32, dtype=torch.float32):
    angle = torch.outer(torch.arange(positions), 0.01 ** (torch.arange(half) / half)).to("cuda")
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_as_on_the_cpu(dtype, interleaved):
    x = inputs(dtype=dtype)[0].requires_grad_()
    cos, sin = angles(half=16)
    offsets = torch.tensor([3, 70], dtype=torch.int32, device="cuda")
    out = heddle.apply_rotary(x, cos, sin, interleaved=interleaved, offsets=offsets)
    on_cpu = heddle.apply_rotary(x.detach().cpu(), cos.cpu(), sin.cpu(), interleaved=interleaved, offsets=offsets.cpu())
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.cpu(), on_cpu, rtol=unit, atol=unit / 1024)
    (back,) = torch.autograd.grad(out, x, out.detach())
    torch.testing.assert_close(back, x.detach(), rtol=4 * unit, atol=4 * unit)


@pytest.mark.parametrize("paged", [False, True])
def test_append_as_on_the_cpu(paged):
    k_new, v_new = inputs(b=2, h=2, sq=5)[1:]
    seqlens = torch.tensor([0, 27], dtype=torch.int32, device="cuda")
    cos, sin = angles()
    pages = torch.tensor([[5, 2], [0, 4]], dtype=torch.int32, device="cuda") if paged else None
    caches = [
        torch.zeros(6 if paged else 2, 16 if paged else 32, 2, 64, device="cuda", dtype=k_new.dtype) for _ in "kv"
    ]
    host = [x.cpu() for x in caches]
    version = caches[0]._version
    heddle.append_kv_cache(k_new, v_new, *caches, seqlens, page_table=pages, rotary_cos=cos, rotary_sin=sin)
    assert caches[0]._version > version
    heddle.append_kv_cache(
        k_new.cpu(),
        v_new.cpu(),
        *host,
        seqlens.cpu(),
        page_table=pages.cpu() if paged else None,
        rotary_cos=cos.cpu(),
        rotary_sin=sin.cpu(),
    )
    torch.testing.assert_close(caches[0].cpu(), host[0], rtol=2**-8, atol=2**-18)
    assert torch.equal(caches[1].cpu(), host[1]) and host[1].count_nonzero() > 0


def test_append_eight_bits_as_on_the_cpu():
    k_new, v_new = inputs(b=2, h=2, sq=5)[1:]
    seqlens = torch.tensor([0, 27], dtype=torch.int32, device="cuda")
    scale = torch.tensor([[[0.02, 0.5]]], device="cuda")
    caches = [torch.zeros(2, 32, 2, 64, device="cuda").to(torch.float8_e4m3fn) for _ in "kv"]
    host = [x.cpu() for x in caches]
    heddle.append_kv_cache(k_new, v_new, *caches, seqlens, k_scale=scale, v_scale=scale)
    new = k_new.cpu(), v_new.cpu()
    heddle.append_kv_cache(*new, *host, seqlens.cpu(), k_scale=scale.cpu(), v_scale=scale.cpu())
    for there, here in zip(caches, host):
        assert torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8)) and here.float().count_nonzero() > 0


def test_append_finds_scales_as_on_the_cpu():
    k_new, v_new = inputs(b=2, h=2, sq=5)[1:]
    seqlens = torch.tensor([0, 27], dtype=torch.int32, device="cuda")
    caches = [torch.zeros(2, 32, 2, 64, device="cuda").to(torch.float8_e4m3fn) for _ in "kv"]
    scales = [torch.ones(2, 32, 2, device="cuda") for _ in "kv"]
    host, host_scales = [x.cpu() for x in caches], [x.cpu() for x in scales]
    heddle.append_kv_cache(k_new, v_new, *caches, seqlens, k_scale=scales[0], v_scale=scales[1])
    new = k_new.cpu(), v_new.cpu()
    heddle.append_kv_cache(*new, *host, seqlens.cpu(), k_scale=host_scales[0], v_scale=host_scales[1])
    for there, here in zip((*caches, *scales), (*host, *host_scales)):
        assert torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8))
    assert (host_scales[0] != 1).sum() == 20


def test_append_on_the_current_stream():
    """The new rows arrive late on a side stream: only a call on that stream comes after them."""
    k_new, v_new = inputs(b=2, h=2, sq=5)[1:]
    late = torch.zeros_like(k_new)
    caches = [torch.zeros(2, 8, 2, 64, device="cuda", dtype=k_new.dtype) for _ in "kv"]
    seqlens = torch.ones(2, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(k_new)
        heddle.append_kv_cache(late, v_new, *caches, seqlens)
    side.synchronize()
    assert torch.equal(caches[0][:, 1:6], k_new)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_with_kvcache(causal):
    from heddle.flash_attn import flash_attn_with_kvcache

    q, k_new, v_new = inputs(b=2, h=4, hkv=2, sq=3)
    caches = [torch.randn(6, 16, 2, 64, generator=torch.Generator().manual_seed(5)).to("cuda", q.dtype) for _ in "kv"]
    table = torch.tensor([[5, 2, 1], [0, 4, 3]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([17, 40], dtype=torch.int32, device="cuda")
    cos, sin = angles()
    host = [x.cpu() for x in (q, *caches, k_new, v_new, cos, sin)]
    out, lse = flash_attn_with_kvcache(
        q,
        *caches,
        k_new,
        v_new,
        cos,
        sin,
        cache_seqlens=lengths,
        block_table=table,
        causal=causal,
        return_softmax_lse=True,
    )
    expected, expected_lse = flash_attn_with_kvcache(
        *host, cache_seqlens=lengths.cpu(), block_table=table.cpu(), causal=causal, return_softmax_lse=True
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(caches[0].cpu(), host[1], rtol=2**-8, atol=2**-18)
