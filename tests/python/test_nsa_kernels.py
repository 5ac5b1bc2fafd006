"""pool_keys and select_blocks: what the reference functions of native sparse attention have, by kernels, and all that an
operation is held to."""

import itertools

import heddle
import pytest
from nsa_kit import FORCED, nsa, operands, torch

OPS = torch.ops.heddle
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def pooled_by_torch(x, block, stride):
    """[B, N, H, D] in x's dtype, sums in double."""
    if x.shape[1] < block:
        return x[:, :0]
    return x.double().unfold(1, block, stride).mean(-1).to(x.dtype)


def number(length, block, stride):
    return 0 if length < block else (length - block) // stride + 1


# ---------------------------------------------------------------- pooling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys, block, stride", [(128, 32, None), (100, 32, 16), (61, 10, 3), (5, 8, 8), (0, 4, 2)])
def test_means_of_blocks(keys, block, stride, dtype):
    x = torch.randn(2, keys, 3, 24).to(dtype)
    found = nsa.pool_keys(x, block, stride)
    assert found.dtype == dtype and found.shape == (2, number(keys, block, stride or block), 3, 24)
    torch.testing.assert_close(found, pooled_by_torch(x, block, stride or block))
    across = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(nsa.pool_keys(across, block, stride), found)


STARTS = (0, 0, 31, 63, 200, 300)


def test_packed_sequences_are_calls_of_their_own():
    x = torch.randn(300, 2, 8, requires_grad=True)
    found = nsa.pool_keys(x, 32, 16, ints(*STARTS))
    assert found.shape == (300 // 16, 2, 8)
    weight = torch.randn_like(found)
    (dx,) = torch.autograd.grad((found * weight).sum(), x)
    expected, gradient = torch.zeros_like(found), torch.zeros_like(x)
    for begin, end in itertools.pairwise(STARTS):
        own = x.detach()[None, begin:end].requires_grad_()
        alone = nsa.pool_keys(own, 32, 16)
        rows = slice(begin // 16, begin // 16 + alone.shape[1])
        expected[rows] = alone[0].detach()
        gradient[begin:end] = torch.autograd.grad((alone * weight[rows]).sum(), own)[0][0]
    assert torch.equal(found, expected) and torch.equal(dx, gradient)


def test_used_lengths():
    x = torch.randn(3, 40, 2, 8)
    found = nsa.pool_keys(x, 8, 4, seqused=ints(0, 21, 40))
    for b, used in enumerate((0, 21, 40)):
        alone = nsa.pool_keys(x[b : b + 1, :used], 8, 4)
        assert torch.equal(found[b, : alone.shape[1]], alone[0])
        assert not found[b, alone.shape[1] :].any()


def test_gradients_are_derivatives():
    x = torch.randn(1, 50, 2, 3, requires_grad=True)
    weight = torch.randn(1, 11, 2, 3)
    (found,) = torch.autograd.grad((nsa.pool_keys(x, 10, 4) * weight).sum(), x)
    (expected,) = torch.autograd.grad((x.unfold(1, 10, 4).mean(-1) * weight).sum(), x)
    torch.testing.assert_close(found, expected)
    assert not nsa.pool_keys(x.detach(), 10, 4).requires_grad
    assert torch.equal(torch.func.grad(lambda y: (nsa.pool_keys(y, 10, 4) * weight).sum())(x), found)
    # Pooling is linear: the gradient of <dx, y> in d_pooled is y, pooled.
    d_pooled, y = weight.clone().requires_grad_(), torch.randn_like(x)
    (dx,) = torch.autograd.grad(nsa.pool_keys(x, 10, 4), x, d_pooled, create_graph=True)
    (second,) = torch.autograd.grad((dx * y).sum(), d_pooled)
    torch.testing.assert_close(second, nsa.pool_keys(y, 10, 4))


def test_tangents_are_refused():
    x = torch.randn(1, 8, 1, 2)
    with pytest.raises(NotImplementedError, match=r"\[pool_keys\] .* has a tangent: there are no forward-mode"):
        torch.func.jvp(lambda y: nsa.pool_keys(y, 4), (x,), (x,))


# ---------------------------------------------------------------- the choice


def naive(q, k, n, **options):
    """The lists of the reference, over keys that are not pooled yet."""
    gate = torch.zeros(q.shape[:3])
    return nsa.naive_nsa_compression(q, k, k, gate, n, **options)[0]


def by_kernels(q, k, n, block_size=64, compression_block=None, compression_stride=None, **options):
    block = compression_block or block_size
    k_pooled = nsa.pool_keys(k, block, compression_stride)
    sizes = dict(block_size=block_size, compression_block=compression_block, compression_stride=compression_stride)
    return nsa.select_blocks(q, k_pooled, n, q_offset=k.shape[1] - q.shape[1], **sizes, **options)


FORMS = {
    "plain": dict(block_size=16),
    "the paper's": dict(block_size=64, compression_block=32, compression_stride=16),
    "wider": dict(block_size=16, compression_block=40, compression_stride=8),
    "nothing forced": dict(block_size=32, forced=()),
    "the current block": dict(block_size=16, forced=("current",)),
    "two forced": dict(block_size=16, forced=("first", "previous"), scale=0.7),
}


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("n", [1, 4, 40])
@pytest.mark.parametrize("form", FORMS)
def test_lists_are_the_reference_s(form, n, group):
    q, k = (x.float() for x in operands(300, heads=2, group=group, size=16, seed=group)[:2])
    expected = naive(q, k, n, **FORMS[form])
    # Random scores are apart by more than their roundings, with this seed.
    assert torch.equal(by_kernels(q, k, n, **FORMS[form]), expected)
    assert torch.equal(by_kernels(q[:, 211:], k, n, **FORMS[form]), expected[:, 211:])


def test_steps():
    q, k = (x.float() for x in operands(300, heads=2, group=4, size=16)[:2])
    k_pooled = nsa.pool_keys(k, 16)
    whole = nsa.select_blocks(q, k_pooled, 5, block_size=16)
    for first in (0, 3):
        found = nsa.select_blocks(q[:, first::7], k_pooled, 5, block_size=16, q_offset=first, q_step=7)
        assert torch.equal(found, whole[:, first::7])


def test_ties():
    q = torch.randint(-2, 3, (1, 500, 4, 4)).float()
    k = torch.randint(0, 2, (1, 500, 1, 1)).expand(-1, -1, -1, 4).float()
    k = k[:, torch.arange(500) // 16 * 16]  # a block's keys are equal, and there are two kinds
    q = q[:, :, :1].expand(-1, -1, 4, -1)
    assert torch.equal(by_kernels(q, k, 7, block_size=16), naive(q, k, 7, block_size=16))
    zeros = torch.zeros_like(q)
    assert torch.equal(by_kernels(zeros, k, 40, block_size=16), naive(zeros, k, 40, block_size=16))


def test_packed_sequences():
    starts = (0, 0, 15, 90, 300)
    q, k = (x.float()[0] for x in operands(300, heads=2, group=2, size=16)[:2])
    cu = ints(*starts)
    k_pooled = nsa.pool_keys(k, 16, 8, cu)
    used = ints(*(number(end - begin, 16, 8) for begin, end in itertools.pairwise(starts)))
    found = nsa.select_blocks(
        q, k_pooled, 6, block_size=32, compression_block=16, compression_stride=8, cu_seqlens_q=cu, cu_seqlens_k=cu // 8,
        seqused_k=used,
    )  # fmt: skip
    expected = nsa.naive_nsa_compression_varlen(
        q[None], k[None], k[None], torch.zeros(1, *q.shape[:2]), 6, 32, cu_seqlens=cu, compression_block=16,
        compression_stride=8,
    )[0]  # fmt: skip
    assert torch.equal(found, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lse_of_the_compressed_branch(dtype):
    q, k = (x.to(dtype) for x in operands(200, heads=2, group=4, size=32)[:2])
    k_pooled = nsa.pool_keys(k, 16)
    t = torch.arange(200)
    seen = torch.arange(12) < ((t + 1) // 16)[:, None]
    _, lse = heddle.attention(q, k_pooled, k_pooled, mask=seen[None, None], return_lse=True)
    found = nsa.select_blocks(q, k_pooled, 6, lse=lse, block_size=16)
    assert torch.equal(found, nsa.select_blocks(q, k_pooled, 6, block_size=16))


def test_the_selected_branch():
    q, k, v, _, g_slc, _ = (x.float() for x in operands(300, heads=2, group=4, size=16, v_size=8))
    lists = by_kernels(q, k, 4, block_size=32)
    expected = nsa.naive_nsa(q, k, v, g_slc, None, lists, block_size=32)
    found = g_slc[..., None] * heddle.sparse_attention(q, k, v, lists, block_size=32, causal="top_left")
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def test_lists_have_no_gradient():
    q, k = (x.float().requires_grad_() for x in operands(64, size=16)[:2])
    lists = nsa.select_blocks(q, nsa.pool_keys(k, 16), 3, block_size=16)
    assert not lists.requires_grad and lists.dtype == torch.int32

    def loss(q):
        lists = nsa.select_blocks(q, nsa.pool_keys(k, 16), 3, block_size=16)
        return heddle.sparse_attention(q, k, k, lists, block_size=16, causal="top_left").sum()

    (expected,) = torch.autograd.grad(loss(q), q)
    assert torch.equal(torch.func.grad(loss)(q.detach()), expected)


# ---------------------------------------------------------------- operators


@pytest.mark.parametrize(("block", "stride"), [(16, 16), (10, 3), (48, 7)])
def test_pooled_keys_of_a_cache_that_grows(block, stride):
    x = torch.randn(2, 70, 3, 8, generator=torch.Generator().manual_seed(1))
    every = heddle.nsa.pool_keys(x, block, stride)
    grown, lengths = torch.full_like(every, torch.nan), ints(0, 9)
    of_numpy = grown.numpy().copy()
    for appended in (1, 30, 1, 1, 20, 8):
        lengths += appended
        heddle.nsa.extend_pooled_keys(x, grown, block, stride, seqused=lengths, appended=appended)
        heddle.nsa.extend_pooled_keys(x.numpy(), of_numpy, block, stride, seqused=lengths.numpy(), appended=appended)
        for b, length in enumerate(lengths.tolist()):
            complete = max(0, (length - block) // stride + 1)
            skipped = max(0, (9 * b - block) // stride + 1)  # complete before the first call
            assert torch.equal(grown[b, skipped:complete], every[b, skipped:complete])
            assert grown[b, complete:].isnan().all() and grown[b, :skipped].isnan().all()
    torch.testing.assert_close(torch.from_numpy(of_numpy), grown, rtol=0, atol=0, equal_nan=True)


def test_extending_pooled_keys_refuses_in_words():
    x, pooled = torch.zeros(2, 40, 3, 8), torch.zeros(2, 3, 3, 8)
    call = heddle.nsa.extend_pooled_keys
    with pytest.raises(ValueError, match=r"\[extend_pooled_keys\] appended is 0: it must be at least 1"):
        call(x, pooled, 16, 10, seqused=ints(4, 5), appended=0)
    with pytest.raises(
        ValueError, match=r"\[extend_pooled_keys\] seqused\[1\] is 41: it must be from 0 to the sequence's length, 40"
    ):
        call(x, pooled, 16, 10, seqused=ints(4, 41), appended=1)
    with pytest.raises(ValueError, match=r"\[extend_pooled_keys\] k_pooled is .*: it must be \[2, 3, 3, 8\]"):
        call(x, pooled[:, :2], 16, 10, seqused=ints(4, 5), appended=1)
    with pytest.raises(ValueError, match=r"\[extend_pooled_keys\] x requires a gradient"):
        call(x.clone().requires_grad_(), pooled, 16, 10, seqused=ints(4, 5), appended=1)
    immutable = pooled.numpy()
    immutable.flags.writeable = False
    with pytest.raises(ValueError, match="k_pooled"):
        call(x.numpy(), immutable, 16, 10, seqused=ints(4, 5).numpy(), appended=1)


def test_opcheck():
    x = torch.randn(2, 50, 2, 8, requires_grad=True)
    torch.library.opcheck(OPS.pool_keys.default, (x, 10, 4, None, None), test_utils=CHECKS)
    torch.library.opcheck(OPS.pool_keys.default, (x, 10, 4, None, ints(9, 50)), test_utils=CHECKS)
    grown = torch.zeros_like(OPS.pool_keys(x.detach(), 10, 4, None, None))
    torch.library.opcheck(OPS.extend_pooled_keys.default, (x.detach(), grown, 10, 4, ints(9, 50), 6), test_utils=CHECKS)
    packed = torch.randn(50, 2, 8, requires_grad=True)
    torch.library.opcheck(OPS.pool_keys.default, (packed, 10, 4, ints(0, 20, 50), None), test_utils=CHECKS)
    d_pooled = torch.randn(2, 11, 2, 8, requires_grad=True)
    torch.library.opcheck(OPS.pool_keys_backward.default, (d_pooled, 50, 10, 4, None, None), test_utils=CHECKS)
    q, k = torch.randn(2, 50, 4, 8), torch.randn(2, 3, 2, 8)
    sample = (q, k, 4, None, 16, None, None, 7, None, None, None, None, None, ints(0, 9), 1, 0, 0)
    torch.library.opcheck(OPS.select_blocks.default, sample, test_utils=CHECKS)


def test_compiled():
    def lists_and_loss(q, k):
        k_pooled = nsa.pool_keys(k, 16, 8)
        lists = nsa.select_blocks(q, k_pooled, 4, block_size=32, compression_block=16, compression_stride=8, q_offset=3)
        return lists, (k_pooled * k_pooled).sum()

    compiled = torch.compile(lists_and_loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (90, 133, 9):
        q, k = torch.randn(2, rows, 4, 8), torch.randn(2, rows, 2, 8, requires_grad=True)
        found, expected = compiled(q, k), lists_and_loss(q, k)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(torch.autograd.grad(found[1], k), torch.autograd.grad(expected[1], k))


# ---------------------------------------------------------------- refusals

X, Q, K = torch.randn(2, 50, 2, 8), torch.randn(2, 50, 4, 8), torch.randn(2, 3, 2, 8)
POOL = {
    "x is a list": (lambda: nsa.pool_keys([1.0], 4), ValueError, r"x is a list: it must be an array"),
    "x is None": (lambda: nsa.pool_keys(None, 4), ValueError, r"x is missing"),
    "rank": (lambda: nsa.pool_keys(X[0], 4), ValueError, r"x has 3 dimensions: it must be \[B, S, Hkv, D\]; found \[50, 2, 8\]"),
    "packed rank": (lambda: nsa.pool_keys(X, 4, 4, ints(0, 50)), ValueError, r"x has 4 dimensions: it must be \[total, Hkv, D\]"),
    "dtype": (lambda: nsa.pool_keys(X.double(), 4), (ValueError, TypeError), r"x is .*float64.*: it must be float32, float16 or bfloat16"),
    "block": (lambda: nsa.pool_keys(X, 2, 4), ValueError, r"block is 2: it must be from stride, 4, to 2\^31 - 1"),
    "no block": (lambda: nsa.pool_keys(X, 0), ValueError, r"block is 0: it must be at least 1"),
    "block in words": (lambda: nsa.pool_keys(X, "4"), TypeError, r"block is '4': it must be an int"),
    "stride": (lambda: nsa.pool_keys(X, 4, 0), ValueError, r"stride is 0: it must be at least 1"),
    "int64": (lambda: nsa.pool_keys(X[0], 4, 4, torch.tensor([0, 50])), (ValueError, TypeError), r"cu_seqlens is .*int64: it must be int32"),
    "offsets": (lambda: nsa.pool_keys(X[0], 4, 4, ints(0, 49)), ValueError, r"cu_seqlens ends at 49: it must end at x's first extent, 50"),
    "seqused": (lambda: nsa.pool_keys(X, 4, seqused=ints(1, 51)), ValueError, r"seqused\[1\] is 51: it must be from 0 to the sequence's length, 50"),
    "an operator without a stride": (lambda: OPS.pool_keys(X, 4, 0, None, None), ValueError, r"stride is 0: it must be at least 1"),
}  # fmt: skip
SELECT = {
    "q is None": (dict(q=None), ValueError, r"q is missing"),
    "rank": (dict(q=Q[0]), ValueError, r"q has 3 dimensions: it must be \[B, Sq, H, D\]; found \[50, 4, 8\]"),
    "rank of k": (dict(k_pooled=K[0]), ValueError, r"k_pooled has 3 dimensions: it must be \[B, N, Hkv, D\]"),
    "dtypes": (dict(k_pooled=K.half()), ValueError, r"k_pooled is float16: it must be float32"),
    "head size": (dict(k_pooled=K[..., :7]), ValueError, r"k_pooled has head size 7 and q has 8: they must be equal"),
    "n": (dict(n=-1), ValueError, r"n is -1: it must be at least 0"),
    "n in words": (dict(n=1.5), TypeError, r"n is 1.5: it must be an int"),
    "block_size": (dict(block_size=48), ValueError, r"block_size is 48: it must be 16, 32, 64 or 128"),
    "compression": (dict(compression_block=24), ValueError, r"block_size is 64: it must be a multiple of compression_stride, 24"),
    "forced": (dict(forced=("last",)), ValueError, r"an element of forced is 'last': it must be one of 'first', 'previous'"),
    "forced in words": (dict(forced="first"), TypeError, r"forced is 'first': it must be a tuple of"),
    "scale": (dict(scale="1"), TypeError, r"scale is '1': it must be a number"),
    "no scale": (dict(scale=float("nan")), ValueError, r"scale is nan: it must be finite"),
    "lse": (dict(lse=torch.zeros(2, 2, 50)), ValueError, r"lse is \[2, 2, 50\]: it must be \[B, H, Sq\] = \[2, 4, 50\]"),
    "lse's dtype": (dict(lse=torch.zeros(2, 4, 50).half()), ValueError, r"lse is float16: it must be float32"),
    "q_offset": (dict(q_offset=-1), ValueError, r"q_offset is -1: it must be at least 0"),
    "q_offset beyond": (dict(q_offset=2**31), ValueError, r"q_offset is 2147483648: positions must be below 2\^31 - 1"),
    "q_offset's length": (dict(q_offset=ints(1)), ValueError, r"q_offset has 1 entries: it must have 2"),
    "q_step": (dict(q_step=0), ValueError, r"q_step is 0: it must be at least 1"),
    "positions": (dict(q_step=1 << 30), ValueError, r"q_step is 1073741824 and the last of 50 rows of sequence 0 stands at"),
    "seqused_k": (dict(seqused_k=ints(4, 0)), ValueError, r"seqused_k\[0\] is 4: it must be from 0 to the sequence's length, 3"),
    "devices": (dict(k_pooled=K.to("meta")), ValueError, r"k_pooled is on another device than q"),
}  # fmt: skip


@pytest.mark.parametrize("name", POOL)
def test_pool_keys_refuses(name):
    call, error, words = POOL[name]
    with pytest.raises(error, match=r"\[pool_keys\] " + words):
        call()


@pytest.mark.parametrize("name", SELECT)
def test_select_blocks_refuses(name):
    given, error, words = SELECT[name]
    with pytest.raises(error, match=r"\[select_blocks\] " + words):
        nsa.select_blocks(**{**dict(q=Q, k_pooled=K, n=3), **given})


def test_forced_may_be_any_iterable():
    for forced in (list(FORCED), set(FORCED), iter(FORCED)):
        assert torch.equal(
            nsa.select_blocks(Q, K, 3, block_size=16, forced=forced), nsa.select_blocks(Q, K, 3, block_size=16)
        )
