"""Attention of a few rows to a cache of keys that is spread over the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .._options import causal_code, flag, pair
from ..functional import attention, merge_attention
from ..hosts import offsets
from .attention import DEVICES, _bits, _number, check_device
from .peers import peers_of, reach_each_other
from .pieces import CAUSAL_NAMES
from .ranks import Ranks, name_of, on_device_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from typing_extensions import TypedDict, Unpack

    from .._types import CausalName

    class _Options(TypedDict, total=False):
        page_table: torch.Tensor | None
        cache_batch_idx: torch.Tensor | None
        q_offset: torch.Tensor | int | None
        key_offset: torch.Tensor | int | None
        key_step: int
        causal: CausalName
        window: tuple[int | None, int | None]
        scale: float | None
        softcap: float
        alibi_slopes: torch.Tensor | None
        sink: torch.Tensor | None
        k_scale: torch.Tensor | None
        v_scale: torch.Tensor | None
        group: dist.ProcessGroup | None
        timeout: float | None


_NAME = "distributed.decode"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@overload
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqused_k: torch.Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...
@overload
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqused_k: torch.Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqused_k: torch.Tensor | None = None,
    *,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    q_offset: torch.Tensor | int | None = None,
    key_offset: torch.Tensor | int | None = None,
    key_step: int = 1,
    causal: CausalName = "none",
    window: tuple[int | None, int | None] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Any:
    """Attention to the keys of all ranks of a group, of which each holds a part of the cache: exact, and the same bits on every rank.

    Every rank calls this at the same place of its program, with the same q and with its own cache. Each computes with its own keys;
    then one exchange gives every rank the others' (o, lse), in float32, and each merges them in the order of ranks. New keys are
    written before, by the rank that is to hold them (``heddle.append_kv_cache``). For inference: no gradient. On the CPU and on GPUs.

    Which keys a row attends: every key that is in the caches, which is right where those hold no key behind the row. With causal
    "top_left", or a window, positions of the whole sequence decide, wherever a key lies: row i stands at q_offset[b] + i, and key j of
    this rank's part at key_offset[b] + key_step * j.

    Args:
      q: [B, Sq, H, D], float32, float16 or bfloat16, the same on every rank.
      k_cache, v_cache: this rank's keys and values, [Bc, Smax, Hkv, D], [Bc, Smax, Hkv, Dv], or pages [pages, page_size, Hkv, D or Dv]
        with page_table; of q's dtype, or torch.float8_e4m3fn beside 16-bit q (on GPUs for up to 16 rows, without alibi_slopes). Smax, and
        the number of pages, may be 0 and differ between ranks.
      seqused_k: int32 [B], how many keys of each sequence this rank holds; 0 is allowed. None: all slots of an unpaged cache are keys.
      page_table, cache_batch_idx, k_scale, v_scale: of this rank's cache, as of ``heddle.attention``.
      q_offset: int32 [B] or an int for all: the position of q's first row in the whole sequence.
      key_offset: int32 [B] or an int for all: the position of this rank's first key. Both offsets are needed with causal, a window or
        alibi_slopes, and without them say nothing.
      key_step: this rank's keys stand at every key_step-th position: P where keys go to P ranks in turn.
      causal: "none" or "top_left": a row attends keys at its own position and before.
      window: (left, right): a row attends keys from left positions before it to right behind it; -1 or None leaves a side open.
      scale, softcap: as of ``heddle.attention``.
      alibi_slopes: float32 [H] or [B, H]. Not with a key_step above 1.
      sink: float32 [H], the same on every rank: one more logit in each row's denominator, once, whatever the number of ranks.
      return_lse: also return the log-sum-exp of each row's scores.
      group: of torch.distributed; None: the default one. Without any, this process is the only rank.
      timeout: seconds that the exchange may take; None: the group's own. All ranks give one or none.

    Returns:
      out [B, Sq, H, Dv] of q's dtype, rounded once; with return_lse a pair with lse, float32 [B, H, Sq]. A row without any key gives 0
      and lse -inf (with a sink, lse = sink).

    Raises:
      ValueError: a bad argument, before anything is sent; the message names it, its value and the rule. Also, on every rank, ranks
        that do not agree, which the first call with such shapes and options finds out by an exchange of its own.
      RuntimeError: a rank is lost or took longer than the timeout. The group is of no use then.

    Sources: Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023; docs/partial.md has the merge.
    """
    return_lse = flag(_NAME, "return_lse", return_lse)
    left, right = pair(window)
    _check(q, k_cache, v_cache)
    _check_heads(sink, "sink", q, batched=False)
    _check_heads(alibi_slopes, "alibi_slopes", q, batched=True)
    _check_no_gradient(q=q, k_cache=k_cache, v_cache=v_cache, sink=sink)
    if page_table is not None and seqused_k is None:
        raise ValueError(
            f"[{_NAME}] page_table is given without seqused_k: how many keys lie in the pages must be said"
        )
    of_positions = {
        f"causal '{causal}'": causal_code(causal) != 0,
        f"window {(left, right)}": (left, right) != (-1, -1),
        "alibi_slopes": alibi_slopes is not None,
    }
    for name in (name for name, given in of_positions.items() if given and (q_offset is None or key_offset is None)):
        raise ValueError(
            f"[{_NAME}] {name} is given without q_offset and key_offset: a part of the keys does not know where in the sequence it lies"
        )
    positions = (_positions("q_offset", q_offset, q), _positions("key_offset", key_offset, q))
    arrays = (seqused_k, page_table, cache_batch_idx, *positions, alibi_slopes, sink, k_scale, v_scale)
    numbers = (key_step, causal_code(causal), left, right, None if scale is None else float(scale), float(softcap))
    if torch.compiler.is_compiling():
        operator = torch.ops.heddle.distributed_decode
        out, total = operator(q, k_cache, v_cache, *arrays, *numbers, name_of(group), timeout)
    else:
        with on_device_of(q):
            out, total = decoded(q, k_cache, v_cache, *arrays, *numbers, group, timeout)
    return (out, total) if return_lse else out


def decoded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqused_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    q_offset: torch.Tensor | None,
    key_offset: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sink: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    key_step: int,
    causal: int,
    left: int,
    right: int,
    scale: float | None,
    softcap: float,
    group: dist.ProcessGroup | None,
    timeout: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """decode(), of arguments that have been checked."""
    ranks = Ranks(_NAME, None, group, timeout)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    batch, rows, heads, _ = q.shape
    behind, count = batch * rows * heads * v_cache.shape[3], batch * rows * heads
    length = (behind + count + 3) // 4 * 4  # the kernels of decoding write rows of 16 bytes
    reached = timeout is None and reach_each_other(ranks, q.device)
    room = ranks.agree(
        {
            "batch": batch,
            "rows": rows,
            "heads": heads,
            "kv_heads": k_cache.shape[2],
            "head_size": q.shape[3],
            "head_size_v": v_cache.shape[3],
            "dtype": _DTYPES.index(q.dtype),
            "causal": causal,
            "window's left": left,
            "window's right": right,
            "scale": _bits(scale),
            "softcap": _bits(softcap),
            "alibi_slopes": int(alibi_slopes is not None),
            "sink": int(sink is not None),
            "whether a timeout is given": int(timeout is not None),
        },
        _SHOWN,
        q.device,
        (lambda: 2 * (4 * length + 256)) if reached else None,
    )

    def parts_of(message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """o [B, Sq, H, Dv] and lse [B, H, Sq], as they lie in a message."""
        o, lse = message[:behind], message[behind : behind + count]
        return o.view(batch, rows, heads, v_cache.shape[3]), lse.view(batch, heads, rows)

    peers = peers_of(ranks, q.device, room) if room else None
    messages: Any  # of each rank
    if peers is None:
        messages = torch.empty(ranks.size, length, device=q.device)
    else:
        at = peers.begin_turn()
        messages = [peers.room(at, (length,), torch.float32, r) for r in range(ranks.size)]
    o, lse = parts_of(messages[ranks.rank])
    attention(
        q,
        k_cache,
        v_cache,
        causal=CAUSAL_NAMES[causal],
        window=(left, right),
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        seqused_k=seqused_k,
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        q_offset=q_offset,
        key_offset=key_offset,
        key_step=key_step,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        out_dtype="float32",
        out=o,
        lse_out=lse,
    )
    if peers is None:
        ranks.fill(messages, "partial results gathered")
    else:
        peers.meet()
    os, lses = zip(*map(parts_of, messages))
    merged = merge_attention(os, lses, sink, out=torch.empty(o.shape, dtype=q.dtype, device=q.device))
    if peers is not None:
        peers.end()
    return merged


_SHOWN: dict[str, Callable[[int], object]] = {
    "dtype": _DTYPES.__getitem__,
    "causal": lambda code: ("none", "top_left", "bottom_right")[code],
    "scale": _number,
    "softcap": _number,
}


def _positions(name: str, value: torch.Tensor | int | None, q: torch.Tensor) -> torch.Tensor | None:
    # A number that grows is not to be traced anew each time, as offsets() would have it.
    if torch.compiler.is_compiling() and isinstance(value, int):
        return torch.full(q.shape[:1], value, dtype=torch.int32, device=q.device)
    found: torch.Tensor | None = offsets(name, value, q, None)
    return found


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    check_device(_NAME, DEVICES, q=q, k_cache=k_cache, v_cache=v_cache)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ValueError(
                f"[{_NAME}] {name} is {list(x.shape)}: q must be [B, Sq, H, D], and caches [Bc, Smax, Hkv, D or Dv] or pages "
                "[pages, page_size, Hkv, D or Dv]"
            )
    if q.dtype not in _DTYPES:
        raise ValueError(f"[{_NAME}] q is {q.dtype}: it must be float32, float16 or bfloat16")
    heads, kv_heads = q.shape[2], k_cache.shape[2]
    if k_cache.shape[3] != q.shape[3] or v_cache.shape[:3] != k_cache.shape[:3] or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"[{_NAME}] q is {list(q.shape)}, k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)}: they must be "
            "[B, Sq, H, D], [..., Hkv, D] and [..., Hkv, Dv] with H a multiple of Hkv"
        )


def _check_heads(x: torch.Tensor | None, name: str, q: torch.Tensor, *, batched: bool) -> None:
    """What the ranks that have no keys would not see."""
    if x is None:
        return
    batch, _, heads, _ = q.shape
    shapes = [[heads]] + ([[batch, heads]] if batched else [])
    if x.dtype != torch.float32 or list(x.shape) not in shapes or x.device != q.device:
        rule = "[H] or [B, H]" if batched else "[H]"
        raise ValueError(
            f"[{_NAME}] {name} is {x.dtype} {list(x.shape)} on {x.device}: it must be float32 {rule}, "
            f"{' or '.join(map(str, shapes))}, on {q.device}"
        )


def _check_no_gradient(**tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if torch.is_grad_enabled() and x is not None and x.requires_grad:
            raise ValueError(
                f"[{_NAME}] {name} requires a gradient, and there is no backward: call it under torch.no_grad(), or detach it"
            )
