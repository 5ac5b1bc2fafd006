"""What native sparse attention refuses, in words."""

import math

import pytest
from nsa_kit import nsa, one_thread, operands, torch  # noqa: F401  one_thread is a fixture

# ---------------------------------------------------------------- refusals


def refused():
    q, k, v, g_cmp, g_slc, g_swa = operands(12)
    lists = torch.zeros(1, 12, 2, 3, dtype=torch.int64)

    def given(q=q, k=k, v=v, g_slc=g_slc, g_swa=g_swa, lists=lists, counts=None, **options):
        return lambda: nsa.naive_nsa(q, k, v, g_slc, g_swa, lists, counts, **options)

    def whole(count=2, **options):
        return lambda: nsa.naive_nsa_with_compression(q, k, v, g_cmp, g_slc, g_swa, count, 4, **options)

    def starts(*values, **options):
        return given(cu_seqlens=torch.tensor(values), **options)

    return {
        "q is a ndarray: it must be a torch tensor": given(q=q.numpy()),
        "k is None: it must be a torch tensor": given(k=None),
        "q is nested or sparse": given(q=q.to_sparse()),
        "q has 3 dimensions: it must be [B, T, HQ, D]; found [12, 4, 4]": given(q=q[0]),
        "q is int64: it must be a floating-point tensor": given(q=q.long()),
        "v is float32: it must be float64, as q is": given(v=v.float()),
        "k is on meta and q on cpu": given(k=k.to("meta")),
        "q, k and v must have the same batch; found q [1, 12, 4, 4], k [2, 12, 2, 4]": given(k=k.expand(2, -1, -1, -1)),
        "v must have k's length and heads": given(v=v[:, :11]),
        "q and k must have the same head size": given(k=k[..., :3]),
        "q's heads must be a multiple of k's; found q [1, 12, 3, 4]": given(q=q[:, :, :3]),
        "q must not be longer than k": given(k=k[:, :11], v=v[:, :11]),
        "g_slc is [1, 12, 2]: it must be [B, T, HQ]": given(g_slc=g_slc[..., :2]),
        "g_slc is int64: it must be a floating-point tensor": given(g_slc=g_slc.long()),
        "g_swa is None: it must be a torch tensor": given(g_swa=None, window_size=3),
        "block_indices is [1, 12, 4, 3]: it must be [B, T, H, S]": given(lists=lists.expand(-1, -1, 2, -1).repeat(1, 1, 2, 1)),
        "block_indices is None: it must be a torch tensor": given(lists=None),
        "block_indices is float64: it must be int32 or int64": given(lists=lists.double()),
        "block_counts is -1: it must be at least 0": given(counts=-1),
        "block_counts is True: it must be an int": given(counts=True),
        "block_counts is [12, 2]: it must be an int or [B, T, H], here [1, 12, 2]": given(counts=lists[0, ..., 0]),
        "block_counts is float64: it must be int32 or int64": given(counts=g_slc[..., :2]),
        "block_counts is 1.5: it must be an int": whole(1.5),
        "block_size is 0: it must be at least 1": given(block_size=0),
        "block_size is '64': it must be an int": given(block_size="64"),
        "window_size is -1: it must be at least 0": given(window_size=-1),
        "scale is 'x': it must be a number": given(scale="x"),
        "scale is nan: it must be finite": given(scale=math.nan),
        "head_first is True: it must be False, since tensors are [B, T, H, D]": given(head_first=True),
        "k_swa is float64 [1, 11, 2, 4] and k is float64 [1, 12, 2, 4]: they must be alike": given(k_swa=k[:, 1:]),
        "q is [2, 12, 4, 4]: with cu_seqlens the batch must be 1": starts(
            0, 12, q=q.repeat(2, 1, 1, 1), k=k.repeat(2, 1, 1, 1), v=v.repeat(2, 1, 1, 1), lists=lists.repeat(2, 1, 1, 1),
            g_slc=g_slc.repeat(2, 1, 1), g_swa=g_swa.repeat(2, 1, 1)),
        "cu_seqlens is float64 [1]: it must be int32 or int64 [N + 1]": given(cu_seqlens=q[0, 0, 0, :1]),
        "cu_seqlens is 12: it must be a torch tensor": given(cu_seqlens=12),
        "cu_seqlens has 3 elements: it must be a tensor, or a pair": given(cu_seqlens=[0, 5, 12]),
        "cu_seqlens[0] is 1: it must be 0": starts(1, 12),
        "cu_seqlens[2] is 4: it must be at least the one before, 5": starts(0, 5, 4, 12),
        "cu_seqlens[2] is 11: it must be the length of q, 12": starts(0, 5, 11),
        "cu_seqlens[1][1] is 13: it must be the length of k, 12": given(
            cu_seqlens=(torch.tensor([0, 12]), torch.tensor([0, 13]))
        ),
        "cu_seqlens has 1 sequences of q and 2 of k": given(cu_seqlens=(torch.tensor([0, 12]), torch.tensor([0, 5, 12]))),
        "sequence 1 has 8 rows of q and 7 keys": given(cu_seqlens=(torch.tensor([0, 4, 12]), torch.tensor([0, 5, 12]))),
        "cu_seqlens is None: it must be int32 or int64 [N + 1]": lambda: nsa.naive_nsa_compression_varlen(q, k, v, g_cmp, 2),
        "an element of forced is 'last': it must be one of 'first', 'previous', 'current'": whole(forced=("last",)),
        "forced is 'first': it must be a tuple of": whole(forced="first"),
        "compression_block is 6: it must be a multiple of compression_stride, 4": whole(
            compression_block=6, compression_stride=4
        ),
        "block_size is 4: it must be a multiple of compression_stride, 8": whole(compression_block=8),
        "compress is 'mean': it must be callable": whole(compress="mean"),
        "query_stride is 0: it must be at least 1": whole(query_stride=0),
        "query_stride is 2 and share is 'none': say what rows take": whole(query_stride=2),
        "share is 'all': it must be one of 'none', 'selection', 'output', 'delta'": whole(share="all"),
        "gate is 'mine': it must be one of 'own', 'anchor'": whole(gate="mine"),
        "an element of share_branches is 'x': it must be one of 'cmp', 'slc', 'swa'": whole(share_branches=("x",)),
        "share_branches is empty and query_stride is 2": whole(query_stride=2, share="output", share_branches=()),
        "share_branches is ['slc', 'swa'] and share is 'selection': it must be ('slc',), since that branch alone has a list": (
            whole(query_stride=2, share="selection", share_branches=("slc", "swa"))
        ),
        "and share is 'delta': it must be ('slc',), since that branch alone is corrected": whole(
            query_stride=2, share="delta", share_branches=("cmp",), window_size=2
        ),
        "gate is 'anchor' and share is 'selection': it must be 'own'": whole(
            query_stride=2, share="selection", gate="anchor"
        ),
        "window_size is 0 and share is 'delta': it must be at least 1": whole(query_stride=2, share="delta"),
        "the first row of sequence 0 stands at position 3: it must be a multiple of query_stride, 2": given(
            q=q[:, 3:], g_slc=g_slc[:, 3:], g_swa=g_swa[:, 3:], lists=lists[:, 3:], query_stride=2, share="output"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("text", refused())
def test_what_is_refused(text):
    with pytest.raises((ValueError, TypeError)) as error:
        refused()[text]()
    assert str(error.value).startswith("[naive_nsa")
    assert text in str(error.value)
