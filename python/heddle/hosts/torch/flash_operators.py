"""torch's operators of flash attention, by Heddle: functions of the operators' arguments, for tensors on any device.
heddle.hosts.torch.activate puts them in the place of torch's own kernels.

Causality and windows start from the bottom-right corner in all of them, also in ``_scaled_dot_product_flash_attention``:
``scaled_dot_product_attention`` calls it with ``is_causal`` where query and key have one length, and
``torch.nn.attention.bias.causal_lower_right`` where they have not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import _heddle
from ..._options import lse_shape, pack
from .operators import native

MAX_HEAD_SIZE = 256
_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))

_Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NotServed(Exception):
    """Says why a call is for torch's own kernel. What it is raised from is what Heddle's kernels said, if they were asked."""


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> None:
    """What all of torch's operators that Heddle stands in for may be asked for, and Heddle's kernels are not."""
    if q.dtype not in _DTYPES:
        raise NotServed(f"query is {q.dtype}")
    if not q.dtype is k.dtype is v.dtype:
        raise NotServed(f"query is {q.dtype}, key {k.dtype}, value {v.dtype}")
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > MAX_HEAD_SIZE:
        raise NotServed(f"query has head size {q.shape[-1]} and value {v.shape[-1]}")
    if dropout_p != 0.0:
        raise NotServed(f"dropout_p is {dropout_p}")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, others: dict[str, Any]) -> None:
    check(q, k, v, dropout_p)
    if q.is_cuda and q.dtype is torch.float32:  # torch's own refuses it
        raise NotServed("query is torch.float32 on a GPU")
    for name, value in others.items():  # of a torch whose operator has more arguments
        if value is not None:
            raise NotServed(f"{name} is given")


def _run(function: Callable[..., None], q: torch.Tensor, *arguments: Any) -> None:
    """native(). What the native module refuses, before it has written anything, is for torch's own kernel; what the checks of
    an earlier call have found is no refusal."""

    def asked(*given: Any) -> None:
        try:
            function(*given)
        except ValueError as error:
            raise NotServed(str(error)) from error

    native(asked, q, *arguments)


def _window(left: int | None, right: int | None, max_k: int) -> tuple[int, int]:
    """A right side that reaches over all keys is open to torch's operator, wherever the row stands."""
    left, right = (-1 if side is None or side < 0 else side for side in (left, right))
    return left, -1 if right >= max_k else right


def _random_state(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rng_state, unused and debug_attn_mask of a call without dropout: nobody reads them."""
    return (
        torch.empty(2, dtype=torch.uint64, device=q.device),
        torch.empty((), dtype=torch.uint64, device=q.device),
        torch.empty(0, dtype=q.dtype, device=q.device),
    )


def _all_rows_meet_keys(rows: int, keys: int, causal: bool, window: tuple[int, int]) -> bool:
    """Of sequences of one length."""
    return keys > 0 and (rows <= keys or not (causal or window != (-1, -1)))


def _attend(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    heads_first: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Writes out and returns lse, float32 [B, H, Sq], packed [H, total_q]. heads_first: q, k, v and out are [B, H, S, D]."""
    _check(q, k, v, dropout_p, others)
    packed = cum_seq_q is not None
    if return_debug_mask:
        raise NotServed("return_debug_mask is True")
    if not packed and (seqused_k is not None or block_table is not None):  # which torch's own does not look at there
        raise NotServed("seqused_k or block_table is given without cum_seq_q")
    if alibi_slopes is not None and is_causal and q.is_cuda:
        raise NotServed("alibi_slopes is given, and torch's own log-sum-exp of causal rows is without the row's part")
    if block_table is not None:
        if seqused_k is None and cum_seq_k is not None:
            seqused_k = cum_seq_k.diff()
        cum_seq_k = None
    if packed:
        window = _window(window_size_left, window_size_right, max_k)
        lse = torch.empty(lse_shape(q.shape, True), dtype=torch.float32, device=q.device)
        all_meet_keys = False  # nobody knows the lengths here
    else:
        along = 2 if heads_first else 1
        max_q, max_k = q.shape[along], k.shape[along]
        window = _window(window_size_left, window_size_right, max_k)
        lse = torch.empty((q.shape[0], q.shape[3 - along], max_q), dtype=torch.float32, device=q.device)
        all_meet_keys = _all_rows_meet_keys(max_q, max_k, is_causal, window)
    items = pack(
        scale=scale,
        causal="bottom_right" if is_causal else "none",
        window=window,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        seqused_k=seqused_k,
        page_table=block_table,
        alibi_slopes=alibi_slopes,
        max_seqlen_q=max_q if packed else 0,
        max_seqlen_k=max_k if packed else 0,
        batch_invariant=num_splits == 1,
    )
    _run(_heddle.attention_forward, q, k, v, out, lse, items, heads_first)
    if not all_meet_keys:
        lse.masked_fill_(lse == -torch.inf, torch.inf)  # as torch's own has it for rows that meet no key
    return lse


def flash_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **named: Any
) -> _Five:
    """aten::_flash_attention_forward: query [B, Sq, H, D], key and value [B, Sk, Hkv, D]; with cum_seq_q and cum_seq_k int32
    [B + 1] packed, [total, H, D]; with block_table key and value in pages [pages, page size, Hkv, D].

    -> out as query, lse float32 [B, H, Sq] or [H, total_q] (+inf for rows that meet no key), and three that nobody reads."""
    out = torch.empty_like(query)
    lse = _attend(out, query, key, value, *arguments, **named)
    return out, lse, *_random_state(query)


def flash_attention_forward_into(out: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: writes out, returns lse."""
    return _attend(out, *arguments, **named)


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: query [B, H, Sq, D], key and value [B, Hkv, Sk, D] -> out, lse [B, H, Sq],
    no cum_seq_q, no cum_seq_k, Sq, Sk, and three that nobody reads."""
    rows, keys = query.shape[2], key.shape[2]
    out = torch.empty_like(query)
    operands = (out, query, key, value, None, None, rows, keys, dropout_p, is_causal, return_debug_mask)
    lse = _attend(*operands, scale=scale, heads_first=True, **others)
    return out, lse, None, None, rows, keys, *_random_state(query)


def flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    heads_first: bool = False,
    **others: Any,
) -> _Three:
    """aten::_flash_attention_backward: the gradients of query, key and value."""
    _check(query, key, value, dropout_p, others)
    packed, along = cum_seq_q is not None, 2 if heads_first else 1
    if not packed:
        max_q, max_k = query.shape[along], key.shape[along]
    window = _window(window_size_left, window_size_right, max_k)
    if packed or not _all_rows_meet_keys(max_q, max_k, is_causal, window):
        logsumexp = logsumexp.masked_fill(logsumexp == torch.inf, -torch.inf)
    if grad_out.stride(-1) != 1:  # of a sum, say
        grad_out = grad_out.contiguous()
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    items = pack(
        scale=scale,
        causal="bottom_right" if is_causal else "none",
        window=window,
        cu_seqlens_q=cum_seq_q if packed else None,
        cu_seqlens_k=cum_seq_k if packed else None,
        max_seqlen_q=max_q if packed else 0,
        max_seqlen_k=max_k if packed else 0,
    )
    operands = (query, key, value, out, logsumexp, grad_out, None, dq, dk, dv, None, None)
    _run(_heddle.attention_backward, *operands, items, heads_first, False, False)
    return dq, dk, dv


def sdpa_backward(*arguments: Any, **named: Any) -> _Three:
    """aten::_scaled_dot_product_flash_attention_backward: of tensors [B, H, S, D]."""
    return flash_attention_backward(*arguments, heads_first=True, **named)


#: What stands in for which operator of torch's.
FLASH: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_into,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
#: Of those, what torch calls without asking whether there is such a kernel: ``torch.nn.attention.varlen`` does.
PACKED = ("_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace", "_flash_attention_backward")
