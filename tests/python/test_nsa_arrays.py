"""pool_keys and select_blocks on numpy arrays and what supports DLPack: torch's bits, and refusals in words."""

import itertools

import numpy as np
import pytest
import torch
from dlpack_kit import Producer
from heddle import _heddle, nsa
from heddle.hosts import arrays
from kit import OnlyDLPack

STARTS = (0, 0, 31, 63, 200, 300)


def random(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def ints(*values):
    return np.array(values, np.int32)


def of_torch(x):
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def same(function, *operands, **options):
    """What function gives for arrays, which has the bits of what it gives for torch's tensors."""
    found = function(*operands, **options)
    expected = function(*map(of_torch, operands), **{name: of_torch(x) for name, x in options.items()})
    assert type(found) is np.ndarray and found.dtype == expected.numpy().dtype
    assert np.array_equal(found, expected.numpy())
    return found


# ---------------------------------------------------------------- pooling


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("keys, block, stride", [(128, 32, None), (61, 10, 3), (5, 8, 8), (5, 90, 8), (0, 4, 2)])
def test_means_have_torch_s_bits(keys, block, stride, dtype):
    x = random(2, keys, 3, 24, dtype=dtype)
    assert same(nsa.pool_keys, x, block, stride).dtype == dtype


def test_packed_and_used_keys():
    assert same(nsa.pool_keys, random(300, 2, 8), 32, 16, ints(*STARTS)).shape == (300 // 16, 2, 8)
    same(nsa.pool_keys, random(3, 40, 2, 8), 8, 4, seqused=ints(0, 21, 40))


def test_views_and_read_only_keys():
    x = random(2, 60, 2, 8)
    expected = nsa.pool_keys(x, 8, 4)
    x.flags.writeable = False
    assert np.array_equal(nsa.pool_keys(x, 8, 4), expected)
    flipped = np.ascontiguousarray(x[:, ::-1])
    assert np.array_equal(nsa.pool_keys(flipped[:, ::-1], 8, 4), expected)
    wide = np.zeros((2, 60, 2, 16), np.float32)
    wide[..., ::2] = x
    assert np.array_equal(nsa.pool_keys(wide[..., ::2], 8, 4), expected)


# ---------------------------------------------------------------- the choice


def operands(dtype=np.float32):
    """q and pooled keys, in blocks of 16."""
    return random(2, 100, 8, 16, dtype=dtype), nsa.pool_keys(random(2, 100, 2, 16, dtype=dtype), 16)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_lists_are_torch_s(dtype):
    q, k = operands(dtype)
    found = same(nsa.select_blocks, q, k, 4, block_size=16)
    assert found.shape == (2, 100, 2, 4) and found.dtype == np.int32
    same(nsa.select_blocks, q, k, 3, block_size=32, compression_block=16, forced=("current",), scale=0.7)
    assert same(nsa.select_blocks, q, k, 0, block_size=16).shape == (2, 100, 2, 0)


def test_lse_and_positions():
    q, k = operands()
    same(nsa.select_blocks, q, k, 4, block_size=16, lse=random(2, 8, 100))
    whole = nsa.select_blocks(q, k, 4, block_size=16)
    for offset in (60, np.int64(60), ints(60, 60)):
        found = nsa.select_blocks(q[:, 60::5], k, 4, block_size=16, q_offset=offset, q_step=5)
        assert np.array_equal(found, whole[:, 60::5])
    same(nsa.select_blocks, q, k, 4, block_size=16, seqused_k=ints(3, 0))


def test_packed_lists():
    q, k, cu = random(300, 4, 16), random(300, 2, 16), ints(*STARTS)
    used = ints(*(max(0, (end - begin - 16) // 8 + 1) for begin, end in itertools.pairwise(STARTS)))
    found = same(nsa.select_blocks, q, nsa.pool_keys(k, 16, 8, cu), 6, block_size=32, compression_block=16,
                 compression_stride=8, cu_seqlens_q=cu, cu_seqlens_k=cu // 8, seqused_k=used, q_offset=3)  # fmt: skip
    assert found.shape == (300, 2, 6)


# ---------------------------------------------------------------- DLPack


def test_bfloat16_by_dlpack():
    x, q = torch.randn(2, 64, 2, 16).bfloat16(), torch.randn(2, 64, 4, 16).bfloat16()
    pooled = nsa.pool_keys(OnlyDLPack(x), 16)
    expected = nsa.pool_keys(x, 16)
    assert torch.equal(torch.from_dlpack(pooled), expected)
    at = torch.tensor([7, 0], dtype=torch.int32)
    for offset in (0, 9, at):
        given = OnlyDLPack(offset) if offset is at else offset
        lists = nsa.select_blocks(OnlyDLPack(q), pooled, 3, block_size=16, q_offset=given)
        assert np.from_dlpack(lists).dtype == np.int32
        assert torch.equal(torch.from_dlpack(lists), nsa.select_blocks(q, expected, 3, block_size=16, q_offset=offset))


def test_a_library_of_dlpack_alone():
    x, q = random(1, 40, 2, 8), random(1, 40, 4, 8)
    pooled = nsa.pool_keys(Producer(x, read_only=True), 8, 8, seqused=Producer(ints(33)))
    expected = nsa.pool_keys(x, 8, seqused=ints(33))
    assert np.array_equal(np.from_dlpack(pooled), expected)
    lists = nsa.select_blocks(Producer(q), Producer(expected), 2, block_size=16, compression_block=8)
    assert np.array_equal(np.from_dlpack(lists), nsa.select_blocks(q, expected, 2, block_size=16, compression_block=8))


def test_gradients_are_torch_s_alone():
    """As with heddle.sparse_attention, the first array says whose call it is."""
    q, k = operands()
    leaf = torch.from_numpy(k).requires_grad_()
    assert type(nsa.select_blocks(q, leaf, 4, block_size=16)) is np.ndarray


# ---------------------------------------------------------------- refusals

X, Q, K = random(2, 50, 2, 8), random(2, 50, 4, 8), random(2, 3, 2, 8)
# Arguments, and words that are the same for torch's tensors.
POOL = {
    "rank": (dict(x=X[0]), r"x has 3 dimensions: it must be \[B, S, Hkv, D\]; found \[50, 2, 8\]"),
    "packed rank": (dict(cu_seqlens=ints(0, 50)), r"x has 4 dimensions: it must be \[total, Hkv, D\] with cu_seqlens"),
    "dtype": (dict(x=X.astype(np.int32)), "x is int32: it must be float32, float16 or bfloat16"),
    "stride": (dict(stride=5), r"block is 4: it must be from stride, 5, to 2\^31 - 1"),
    "no stride": (dict(stride=0), "stride is 0: it must be at least 1"),
    "int64": (dict(seqused=np.array([1, 2])), "seqused is int64: it must be int32"),
    "offsets": (dict(x=X[0], cu_seqlens=ints(0, 49)), "cu_seqlens ends at 49: it must end at x's first extent, 50"),
    "seqused": (dict(seqused=ints(1, 51)), r"seqused\[1\] is 51: it must be from 0 to the sequence's length, 50"),
    "strided seqused": (dict(seqused=ints(1, 2, 3, 4)[::2]), "seqused must be contiguous"),
}
SELECT = {
    "rank": (dict(q=Q[0]), r"q has 3 dimensions: it must be \[B, Sq, H, D\]; found \[50, 4, 8\]"),
    "rank of k": (dict(k_pooled=K[0]), r"k_pooled has 3 dimensions: it must be \[B, N, Hkv, D\]"),
    "dtype": (dict(q=Q.astype(np.int32)), "q is int32: it must be float32, float16 or bfloat16"),
    "dtypes": (dict(k_pooled=K.astype(np.float16)), "k_pooled is float16: it must be float32"),
    "n": (dict(n=-1), "n is -1: it must be at least 0"),
    "block_size": (dict(block_size=48), "block_size is 48: it must be 16, 32, 64 or 128"),
    "lse": (dict(lse=random(2, 2, 50)), r"lse is \[2, 2, 50\]: it must be \[B, H, Sq\] = \[2, 4, 50\]"),
    "q_offset": (dict(q_offset=-1), "q_offset is -1: it must be at least 0"),
    "q_offset's length": (dict(q_offset=ints(1)), "q_offset has 1 entries: it must have 2"),
    "seqused_k": (dict(seqused_k=ints(4, 0)), r"seqused_k\[0\] is 4: it must be from 0 to the sequence's length, 3"),
}


def refused(function, error, words, **given):
    with pytest.raises(error, match=rf"^\[{function.__name__}\] " + words):
        function(**given)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    "function, whole, name",
    [
        *((nsa.pool_keys, dict(x=X, block=4), name) for name in POOL),
        *((nsa.select_blocks, dict(q=Q, k_pooled=K, n=3), name) for name in SELECT),
    ],
)
def test_refusals_are_those_of_torch(function, whole, name, kind):
    changes, words = (POOL if function is nsa.pool_keys else SELECT)[name]
    given = {**whole, **changes}
    if kind == "torch":
        given = {n: of_torch(x) for n, x in given.items()}
    refused(function, ValueError, words, **given)


@pytest.mark.parametrize("function", [nsa.pool_keys, nsa.explain_pool_keys])
def test_what_is_no_array(function):
    refused(function, ValueError, "x is a list: it must be an array that supports DLPack", x=[1.0], block=4)
    refused(function, ValueError, "x is missing", x=None, block=4)
    refused(function, ValueError, "x is float64: it must be float32, float16 or bf", x=X.astype(float), block=4)
    masked = np.ma.masked_array(X)
    refused(function, ValueError, "x is a MaskedArray, whose mask would not be read: give its data", x=masked, block=4)


@pytest.mark.parametrize("function", [nsa.select_blocks, nsa.explain_select_blocks])
def test_what_is_no_array_beside_others(function):
    refused(function, ValueError, "q is missing", q=None, k_pooled=K, n=3)
    refused(function, ValueError, "k_pooled is missing", q=Q, k_pooled=None, n=3)
    refused(function, ValueError, "k_pooled is a list: it must be an array", q=Q, k_pooled=[1.0], n=3)


def test_options_of_other_kinds():
    refused(nsa.pool_keys, ValueError, "seqused is a list: it must be an array", x=X, block=4, seqused=[1, 2])
    refused(nsa.select_blocks, TypeError, "q_offset is 1.5: it must be an int", q=Q, k_pooled=K, n=3, q_offset=1.5)
    x, q, k = map(torch.from_numpy, (X, Q, K))
    words = "{} is a ndarray: it must be a torch tensor, as the others are"
    refused(nsa.pool_keys, TypeError, words.format("seqused"), x=x, block=4, seqused=ints(1, 2))
    refused(nsa.select_blocks, TypeError, words.format("k_pooled"), q=q, k_pooled=K, n=3)
    refused(nsa.select_blocks, TypeError, words.format("q_offset"), q=q, k_pooled=k, n=3, q_offset=ints(1, 2))


@pytest.mark.parametrize("wrap", [np.asarray, OnlyDLPack, Producer])
def test_explanations_take_the_same_arrays(wrap):
    x, q, k = ((torch.from_numpy(y) if wrap is OnlyDLPack else y) for y in (X, Q, K))
    assert nsa.explain_pool_keys(wrap(x), 4) == nsa.explain_pool_keys(X.shape, 4)
    assert nsa.explain_select_blocks(wrap(q), wrap(k), 3) == nsa.explain_select_blocks(Q.shape, K.shape, 3)


def test_memory_of_ints_is_of_ints():
    assert np.from_dlpack(_heddle.empty((2, 3), arrays._INT32)).dtype == np.int32
