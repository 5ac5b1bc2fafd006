"""Gradients of torch tensors on a GPU: results, both modes, autocast, tracing, graphs, streams, memory."""

import contextlib

import heddle
import pytest
import torch
from heddle import _heddle, flash_attn
from heddle.hosts.torch import functional as _torch
from kit import DTYPES, assert_accurate, attending, differentiate, in_orders, plain
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)


def inputs(b=2, h=4, hkv=None, sq=96, sk=None, d=64, dv=None, dtype=torch.bfloat16, seed=0):
    """q, k, v on the GPU. Skips the test where no candidate gives gradients of such."""
    random = torch.Generator().manual_seed(seed)
    shapes = (b, sq, h, d), (b, sk or sq, hkv or h, d), (b, sk or sq, hkv or h, dv or d)
    tensors = [torch.randn(shape, generator=random).to("cuda", dtype).requires_grad_() for shape in shapes]
    explanation = heddle.explain(*tensors, backward=True)
    if explanation.chosen is None:
        pytest.skip(f"no candidate of this GPU gives gradients:\n{explanation}")
    return tensors


@contextlib.contextmanager
def deterministic_algorithms(**options):
    torch.use_deterministic_algorithms(True, **options)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(q, k, v, options, ours=None):
    """Results and gradients against double precision on the GPU; `ours`: what heddle.attention takes besides."""
    shape, dtype = (*q.shape[:3], v.shape[-1]), q.dtype
    weight = torch.randn(shape, device="cuda").to(dtype)
    lse_weight = torch.randn(shape[0], shape[2], shape[1], device="cuda")
    only_plain = {"kept": options.pop("kept")} if "kept" in options else {}

    def fused(q, k, v, **rest):
        return heddle.attention(q, k, v, return_lse=True, **rest, **(ours or {}))

    found = differentiate(fused, q, k, v, options, weight, lse_weight, dtype)
    exact = differentiate(plain, q, k, v, {**options, **only_plain}, weight, lse_weight, torch.float64)
    rough = in_orders(
        lambda order: differentiate(
            plain, q, k, v, {**options, **only_plain, "order": order}, weight, lse_weight, dtype
        )
    )
    names = ["out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in ("bias", "sink") if name in options)]
    for name, x, e, r in zip(names, found, exact, rough, strict=True):
        assert_accurate(name, x, e, r, x.dtype, attending(exact[1]))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(),
        dict(b=1, h=3, sq=1, sk=33),
        dict(h=8, hkv=2, sq=70, sk=130, d=128),
        dict(d=96, dv=32),
        dict(b=1, sq=257, d=256),
        dict(b=1, h=2, sq=45, sk=33, d=40),
        dict(b=1, h=4, hkv=2, sq=2100, d=64),
        dict(b=1, h=2, sq=1300, sk=2000, d=128),
    ],
    ids=lambda sizes: "-".join(f"{key}{value}" for key, value in sizes.items()) or "plain",
)
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_matches_double_precision(name, sizes, causal, deterministic):
    check(*inputs(dtype=DTYPES[name], **sizes), {"causal": causal}, {"deterministic": deterministic})


def options_of(name, h, rows, keys, dtype):
    random = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(shape, generator=random).to("cuda")

    masked = torch.rand(2, 1, rows, keys, generator=random).to("cuda") > 0.3
    masked[:, :, :5] = False  # rows without any key
    return {
        "window": {"window": (30, -1), "causal": "bottom_right"},
        "softcap": {"softcap": 3.0},
        "alibi": {"alibi_slopes": draw(h).abs(), "causal": "bottom_right"},
        "bias": {"bias": draw(2, h, rows, keys).to(dtype)},
        "broadcast bias": {"bias": draw(1, h, 1, keys).to(dtype)},
        "mask": {"mask": masked},
        "sink": {"sink": draw(h), "mask": masked},
        "dropout": {"dropout_p": 0.25, "kept": _torch.dropout_keep((2, h, rows, keys), 0.25, torch.tensor(5)).to("cuda")},
        "all": {
            "causal": "bottom_right", "window": (100, -1), "softcap": 5.0, "alibi_slopes": draw(h).abs(), "sink": draw(h),
            "bias": draw(1, h, rows, keys).to(dtype), "mask": masked,
        },
    }[name]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "name", ["window", "softcap", "alibi", "bias", "broadcast bias", "mask", "sink", "dropout", "all"]
)
def test_options(name, dtype):
    q, k, v = inputs(h=4, hkv=2, sq=150, sk=200, dtype=DTYPES[dtype])
    check(q, k, v, options_of(name, 4, 150, 200, q.dtype), {"dropout_seed": 5} if name == "dropout" else {})


def test_packed_equals_each_sequence_alone():
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in inputs(b=1, h=4, hkv=2, sq=400))
    lengths = [130, 1, 0, 269]
    cu = torch.tensor([0, 130, 131, 131, 400], dtype=torch.int32, device="cuda")
    packed = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=269, max_seqlen_k=269)
    weight = torch.randn(400, 4, 64, device="cuda", dtype=q.dtype)
    found = torch.autograd.grad(heddle.attention(q, k, v, causal="bottom_right", **packed), (q, k, v), weight)
    parts = zip(*(x.split(lengths) for x in (q, k, v)))
    outs = [heddle.attention(*(x[None] for x in part), causal="bottom_right")[0] for part in parts]
    for x, y in zip(found, torch.autograd.grad(torch.cat(outs), (q, k, v), weight)):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("size", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", DTYPES)
def test_deterministic_bits(name, size):
    """By argument and as torch asks for it, at every head size, where many blocks add to one gradient."""
    q, k, v = inputs(b=2, h=8, hkv=2, sq=900, d=size, dtype=DTYPES[name])
    weight = torch.randn(q.shape, device="cuda", dtype=q.dtype)

    def step(**options):
        return torch.autograd.grad(heddle.attention(q, k, v, causal="bottom_right", **options), (q, k, v), weight)

    first = step(deterministic=True)
    with deterministic_algorithms():
        for n in range(20):
            for x, y in zip(first, step() if n % 2 else step(deterministic=True)):
                assert torch.equal(x, y)
    with deterministic_algorithms(warn_only=True):
        assert all(torch.equal(x, y) for x, y in zip(first, step()))


def test_sdpa_and_flash_attn():
    q, k, v = inputs(h=4)
    heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(heddle.attention(q, k, v, causal="top_left", deterministic=True).sum(), (q, k, v))
    with deterministic_algorithms():
        found = torch.autograd.grad(heddle.sdpa(*heads_first, is_causal=True).sum(), heads_first)
    for x, y, z in zip(found, expected, heads_first):
        assert torch.equal(x.transpose(1, 2), y) and x.stride() == z.stride()
    qkv = torch.stack([x.detach() for x in (q, k, v)], 2).requires_grad_()
    flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True).sum().backward()
    assert torch.equal(qkv.grad, torch.stack(expected, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cuda", dtype):
        out = heddle.attention(q, k, v)
        theirs = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert out.dtype == theirs.dtype == dtype
    torch.testing.assert_close(out.transpose(1, 2), theirs, rtol=2**-6, atol=2**-8)
    mine = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    other = torch.autograd.grad(theirs.float().square().sum(), (q, k, v))
    for x, y in zip(mine, other):
        assert x.dtype == torch.float32
        assert (x - y).norm() <= 0.02 * y.norm()


def test_grad_scaler_and_infinite_gradients():
    """Gradients that overflow float16 are infinite or NaN, never garbage that the scaler would take for good."""
    q, k, v = inputs(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=10**6)
    optimizer = torch.optim.SGD([q], lr=0.1)
    before = q.detach().clone()
    skipped = 0
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            out = heddle.attention(q, k.detach(), v.detach())
        scaler.scale(out.float().square().sum()).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        if not skipped:
            assert torch.equal(q, before)
    assert skipped > 0 and torch.isfinite(q).all() and not torch.equal(q, before)


def test_compiled_by_inductor():
    def step(q, k, v):
        out, lse = heddle.attention(q * 2, k, v, causal="bottom_right", return_lse=True, deterministic=True)
        return (out.float().sin() * out).sum() + lse.sum()

    tensors = inputs()
    expected = torch.autograd.grad(step(*tensors), tensors)
    found = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors), tensors)
    for x, y in zip(found, expected):
        assert (x.float() - y.float()).norm() <= 0.01 * y.float().norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    q, k, v = inputs()

    def block(q, k, v):
        return heddle.attention(q * 2, k, v, causal="bottom_right", dropout_p=0.1, deterministic=True).float().sin()

    torch.manual_seed(3)
    expected = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    torch.manual_seed(3)
    checkpoint(block, q, k, v, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip((q, k, v), expected))


def test_runs_on_the_stream_of_the_forward():
    """What the backward reads arrives late on a side stream: only a backward on that stream comes after it."""
    q, k, v = inputs()
    weight = torch.randn(q.shape, device="cuda").to(q.dtype)
    expected = torch.autograd.grad(heddle.attention(q, k, v, deterministic=True), (q, k, v), weight)
    late = torch.zeros_like(weight)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = heddle.attention(q, k, v, deterministic=True)
        torch.cuda._sleep(200_000_000)
        late.copy_(weight)
        found = torch.autograd.grad(out, (q, k, v), late)
    side.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_graphed_forward_and_backward():
    tensors = inputs()
    graphed = torch.cuda.make_graphed_callables(
        lambda q, k, v: heddle.attention(q, k, v, deterministic=True), tuple(tensors)
    )
    for seed in (3, 4):
        new = inputs(seed=seed)
        expected = torch.autograd.grad(heddle.attention(*new, deterministic=True).float().square().sum(), new)
        found = torch.autograd.grad(graphed(*new).float().square().sum(), new)
        assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_gradients_of_masked_rows_and_infinite_biases():
    q, k, v = inputs(b=1, sq=130)
    bias = torch.zeros(1, 1, 130, 130, device="cuda", dtype=q.dtype)
    bias[:, :, 17] = -torch.inf
    bias[..., 40:] = -torch.inf
    bias.requires_grad_()
    dq, dk, dv, dbias = torch.autograd.grad(
        heddle.attention(q, k, v, bias=bias).float().square().sum(), (q, k, v, bias)
    )
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv, dbias))
    assert dq[:, 17].count_nonzero() == 0 and dbias[:, :, 17].count_nonzero() == 0
    assert dk[:, 40:].count_nonzero() == dv[:, 40:].count_nonzero() == dbias[..., 40:].count_nonzero() == 0
    assert dq[:, 16].count_nonzero() > 0 and dk[:, 39].count_nonzero() > 0


def test_gradients_of_sums_and_slices():
    """Gradients that autograd hands over with strides of 0, or as parts of others."""
    q, k, v = inputs()
    weight = torch.ones(q.shape, device="cuda", dtype=q.dtype)
    expected = torch.autograd.grad(heddle.attention(q, k, v, deterministic=True), (q, k, v), weight)
    summed = torch.autograd.grad(heddle.attention(q, k, v, deterministic=True).sum(), (q, k, v))
    beside = torch.cat([heddle.attention(q, k, v, deterministic=True), q.detach()[..., :1]], -1)
    parts = torch.autograd.grad(beside.float().sum(), (q, k, v))
    for x, y, z in zip(expected, summed, parts):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_memory_is_linear_in_the_length():
    """Forward and backward at 8192 rows in less than a quarter of what one matrix of scores would take."""
    q, k, v = inputs(b=1, h=8, sq=8192)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for deterministic in (False, True):
        torch.autograd.grad(heddle.attention(q, k, v, deterministic=deterministic).sum(), (q, k, v))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 8 * 8192**2 * 2 / 4
