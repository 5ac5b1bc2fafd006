"""Selection by input: what it refuses, and in which words."""

import pytest
import torch
from heddle import selection

H, HKV, D = 4, 2, 16
Q, K = torch.zeros(1, 64, H, D), torch.zeros(1, 64, HKV, D)
STARTS = torch.tensor([0, 64], dtype=torch.int32)


@pytest.mark.parametrize(
    "q, k, options, words",
    [
        (Q, K, {}, r"neither top_k nor top_p is given"),
        (Q, K, {"top_k": 0}, r"top_k is 0: it must be at least 1"),
        (torch.zeros(1, 256, H, D), torch.zeros(1, 256, HKV, D), {"top_k": 1}, r"top_k is 1: it must be at least 2, the blocks"),
        (torch.zeros(1, 256, H, D), torch.zeros(1, 320, HKV, D), {"top_k": 3, "local_blocks": 2}, "top_k is 3: it must be at least 4"),
        (Q, K, {"top_p": 0}, r"top_p is 0: it must be above 0"),
        (Q, K, {"top_p": 1.5}, r"top_p is 1.5: it must be above 0 and no more than 1"),
        (Q, K, {"top_p": "a"}, r"top_p is 'a': it must be a number"),
        (Q, K, {"top_k": 2, "least": 1}, r"least is 1 without top_p"),
        (Q, K, {"top_k": 2, "top_p": 0.5, "least": 3}, r"least is 3: it must be no more than top_k, 2"),
        (Q, K, {"top_k": 2, "block_size": 48}, r"block_size is 48: it must be 16, 32, 64 or 128"),
        (Q, K, {"top_k": 2, "query_rows": 2000}, r"query_rows is 2000: it must be from 1 to 1024"),
        (Q, K, {"top_k": 2, "query_rows": 24}, r"stride is 16: it must divide query_rows, 24"),
        (Q, K, {"top_k": 2, "stride": 0}, r"stride is 0: it must be at least 1"),
        (Q, K, {"top_k": 2, "strict": True}, r"strict is True and causal is False"),
        (Q, torch.zeros(1, 80, HKV, D), {"top_k": 2, "strict": True, "causal": True}, r"strict is True, and q has 64 rows and k 80 keys"),
        (Q, torch.zeros(1, 32, HKV, D), {"top_k": 2}, r"q has 64 rows and k 32 keys: there must be no more rows"),
        (Q, torch.zeros(1, 64, 3, D), {"top_k": 2}, r"q has 4 heads and k 3: those of q must be a multiple"),
        (Q, torch.zeros(1, 64, HKV, 8), {"top_k": 2}, r"they must have one head size"),
        (Q, K.half(), {"top_k": 2}, r"q is torch.float32 and k torch.float16: they must be of one dtype"),
        (Q.double(), K.double(), {"top_k": 2}, r"q is torch.float64: it must be float32, float16 or bfloat16"),
        (Q[0], K[0], {"top_k": 2}, r"q is \[64, 4, 16\]: it must be \[B, S, heads, D\]"),
        (Q, K, {"top_k": 2, "cu_seqlens_q": STARTS}, r"it must be \[total, heads, D\], as cu_seqlens_q is given"),
        (Q, K, {"top_k": 2, "cu_seqlens_k": STARTS}, r"cu_seqlens_k is given without cu_seqlens_q"),
        (Q[0], K[0], {"top_k": 2, "cu_seqlens_q": [0, 64]}, r"cu_seqlens_q is \[0, 64\]: it must be an int32 tensor"),
        (Q[0], K[0, :60], {"top_k": 2, "cu_seqlens_q": STARTS}, r"without cu_seqlens_k there must be as many"),
        (Q, K, {"top_k": 2, "scale": float("inf")}, r"scale is inf: it must be finite"),
        (Q, K, {"top_k": 2, "sink_blocks": -1}, r"sink_blocks is -1: it must be at least 0"),
        (Q, K, {"top_k": 2, "causal": "top_left"}, r"causal"),
        (Q.numpy(), K, {"top_k": 2}, r"q is a ndarray: it must be a torch tensor"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(q, k, options, words):
    with pytest.raises((ValueError, TypeError), match=r"\[selection.antidiagonal\] .*" + words):
        selection.antidiagonal(q, k, **options)


def test_probing_is_refused_where_a_model_learns():
    with pytest.raises(ValueError, match="gradients are on: the last rows choose for all before them"):
        selection.vertical_slash(Q, K, columns=1, diagonals=1)
    with torch.no_grad(), pytest.raises(ValueError, match="probes is 0: it must be at least 1"):
        selection.vertical_slash(Q, K, columns=1, diagonals=1, probes=0)
