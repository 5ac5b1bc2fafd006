"""Native sparse attention by Heddle's operations: pooled keys, lists of blocks chosen by score, attention over them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..functional import attention
from ..hosts.torch.gate_operators import gate_branches
from ..hosts.torch.transforms import transformed
from ..sparse import sparse_attention
from . import checks
from .branches import FORCED, Compress
from .kernels import pool_keys, select_blocks
from .rows import BatchedRows, PackedRows, Rows
from .sequences import Form
from .sharing import BRANCHES, Sharing, checked_sharing

if TYPE_CHECKING:
    from .._types import BranchName, ForcedName, GateName, ShareName

# Of cmp, slc and swa. None: there is no such branch, but for slc, which is then added as it is.
Gates = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Branch = tuple[torch.Tensor, torch.Tensor | None]  # an output and its gate; None: it is in the output


def parallel_nsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None = None,
    g_slc: torch.Tensor | None = None,
    g_swa: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    block_counts: torch.Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | Sequence[torch.Tensor] | None = None,
    head_first: bool = False,
    *,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    k_swa: torch.Tensor | None = None,
    v_swa: torch.Tensor | None = None,
    forced: Iterable[ForcedName] = FORCED,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    compress: Compress | None = None,
    query_stride: int = 1,
    share: ShareName = "none",
    share_branches: Iterable[BranchName] = ("slc",),
    gate: GateName = "own",
    max_seqlen: int | tuple[int, int] | None = None,
    max_block_counts: int | None = None,
) -> torch.Tensor:
    """Native sparse attention, ``g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa``: what naive_nsa_with_compression means, by
    kernels, forward and backward, in memory that grows with rows and not with rows times blocks.

    Args:
      q, k, v: [B, Tq, HQ, D], [B, Tk, H, D], [B, Tk, H, Dv], Tq <= Tk (the rows of q are the last positions); float32, float16
        or bfloat16, D and Dv to 256, HQ any multiple of H.
      g_cmp, g_slc, g_swa: [B, Tq, HQ], the branches' gates. Without g_cmp there is no compressed branch, though blocks are
        still chosen by its scores; without g_slc the selected branch is added as it is; g_swa may be None where window_size
        is 0.
      block_indices: int32 or int64 [B, Tq, H, S], lists from outside; none are then chosen. A list is a set.
      block_counts: how many blocks a list has, those of its first slots: an int, or [B, Tq, H].
      block_size: keys of a block: 16, 32, 64 or 128.
      window_size, scale, cu_seqlens, head_first, k_swa, v_swa, query_stride, share, share_branches, gate: as for naive_nsa.
      k_cmp, v_cmp, forced, compression_block, compression_stride, compress: as for naive_nsa_with_compression.
      max_seqlen: no packed sequence is longer: one number, or a pair (of q, of k). Without it cu_seqlens is read, and checked,
        which on a GPU waits for it; with it nothing is.
      max_block_counts: no list is longer. Without it, and without block_indices, a block_counts that is a tensor is read.

    Returns:
      [B, Tq, HQ, Dv] of q's dtype. Branches are summed in float32 and rounded once; on a GPU branches of 16-bit operands are
      rounded to 16 bits before.

    Raises:
      ValueError, TypeError: a bad argument; the message names it, its value and the rule.

    Source: Yuan et al., arXiv 2502.11089.
    """
    name = "parallel_nsa"
    checks.no_head_first(name, head_first)
    checks.operands(name, q, k, v)
    k_cmp, v_cmp = checks.like(name, "k_cmp", k_cmp, "k", k), checks.like(name, "v_cmp", v_cmp, "v", v)
    k_swa, v_swa = checks.like(name, "k_swa", k_swa, "k", k), checks.like(name, "v_swa", v_swa, "v", v)
    most = None if max_block_counts is None else checks.integer(name, "max_block_counts", max_block_counts, 0)
    if block_indices is not None:
        checks.lists(name, block_indices, q, k)
        most = block_indices.shape[3] if most is None else min(most, block_indices.shape[3])
    gates, form, counts = checked_form(
        name, q, k, (g_cmp, g_slc, g_swa), block_counts, block_size, window_size, scale, forced,
        compression_block, compression_stride, compress, query_stride, share, share_branches, gate, most, True,
    )  # fmt: skip
    shape = (*q.shape[:3], v.shape[3])
    if q.shape[0] * q.shape[1] == 0:
        return q.sum().to(q.dtype) + q.new_zeros(shape)

    rows, (q, k, v, k_cmp, v_cmp, k_swa, v_swa, *of_branches, block_indices, counts) = laid_out(
        name,
        cu_seqlens,
        max_seqlen,
        form.sharing.stride,
        (q, k, v, k_cmp, v_cmp, k_swa, v_swa, *gates, block_indices, counts),
    )
    assert k_cmp is not None and v_cmp is not None and k_swa is not None and v_swa is not None
    pooled = None
    if g_cmp is not None or block_indices is None:
        pooled = pooled_keys(rows, k_cmp, v_cmp, form)
    operands = (q, k, v, k_swa, v_swa, *(pooled or (None, None)), *of_branches, block_indices, counts)
    parts = _parts(operands)
    if parts == 1:
        return _attend(rows, operands, form).reshape(shape)
    out = q.new_empty(*q.shape[:-1], shape[-1])
    for part in range(parts):
        _attend(
            rows,
            [_heads(x, axis, part, parts) for x, axis in zip(operands, _HEADS)],
            form,
            _heads(out, -2, part, parts),
        )
    return out.reshape(shape)


# Above, a call without gradients goes through its heads in parts: a branch's output, until it is summed.
_BRANCH_BYTES = 512 << 20
# The axis of heads in q, k, v, k_swa, v_swa, pooled keys and values, three gates, lists and counts.
_HEADS = (-2, -2, -2, -2, -2, -2, -2, -1, -1, -1, -2, -1)


def _parts(operands: Sequence[torch.Tensor | None]) -> int:
    """In how many parts of its key/value heads a call is computed, so that branches do not take several times its output."""
    q, k, v = operands[:3]
    assert q is not None and k is not None and v is not None
    if torch.compiler.is_compiling() or transformed():
        return 1
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        return 1
    heads = k.shape[-2]
    bytes_of_branch = q.shape[:-1].numel() * v.shape[-1] * (q.element_size() if q.is_cuda else 4)
    return next(
        parts
        for parts in range(1, heads + 1)
        if heads % parts == 0 and (bytes_of_branch <= parts * _BRANCH_BYTES or parts == heads)
    )


def _heads(x: torch.Tensor | None, axis: int, part: int, parts: int) -> Any:
    return None if x is None else x.chunk(parts, axis)[part]


def _attend(rows: Rows, operands: Sequence[Any], form: Form, out: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v, k_swa, v_swa, k_pooled, v_pooled, g_cmp, g_slc, g_swa, lists, counts = operands
    pooled = None if k_pooled is None else (k_pooled, v_pooled)
    return attend(rows, q, (k, v, k_swa, v_swa), pooled, (g_cmp, g_slc, g_swa), lists, counts, form, out)


def laid_out(
    name: str, cu_seqlens: Any, max_seqlen: Any, query_stride: int, tensors: tuple[torch.Tensor | None, ...]
) -> tuple[Rows, tuple[Any, ...]]:
    """How the rows lie, and the tensors (q, k and more) as operations take them: packed ones without their batch."""
    q, k = tensors[:2]
    assert q is not None and k is not None
    if cu_seqlens is None:
        rows = BatchedRows(q.shape[1], k.shape[1])
        checks.anchor_first(name, "q", rows.first, query_stride)
        return rows, tensors
    packed = PackedRows(*checks.packed(name, q, k, cu_seqlens, max_seqlen, query_stride), q.shape[1])
    return packed, tuple(None if x is None else x[0] for x in tensors)


def checked_form(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    gates: Gates,
    block_counts: torch.Tensor | int,
    block_size: int,
    window_size: int,
    scale: float | None,
    forced: Iterable[ForcedName],
    compression_block: int | None,
    compression_stride: int | None,
    compress: Compress | None,
    query_stride: int,
    share: ShareName,
    share_branches: Iterable[BranchName],
    gate: GateName,
    most: int | None = None,
    ungated: bool = False,
) -> tuple[Gates, Form, torch.Tensor | None]:
    """The gates that have a branch, what the call is made of, and how long each list is if not all are as long. most: no list
    is longer. ungated: g_slc may be None."""
    g_cmp, g_slc, g_swa = gates
    block_size = checks.integer(name, "block_size", block_size, 1)
    window_size = checks.integer(name, "window_size", window_size, 0)
    if g_slc is not None or not ungated:
        checks.gate(name, "g_slc", g_slc, q)
    if g_cmp is not None:
        checks.gate(name, "g_cmp", g_cmp, q)
    if g_swa is not None or window_size > 0:
        checks.gate(name, "g_swa", g_swa, q)
    slots, counts = checks.slots_and_counts(name, block_counts, q, k, most)
    sharing = checked_sharing(name, query_stride, share, share_branches, gate, window_size)
    form = Form(
        block_size,
        checks.scale_of(name, scale, q),
        sharing,
        window_size,
        slots,
        checks.some_of(name, "forced", forced, FORCED),
        checks.compression(name, block_size, compression_block, compression_stride, compress),
        compress,
    )
    return (g_cmp, g_slc, g_swa if window_size > 0 else None), form, counts


def attend(
    rows: Rows,
    q: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    pooled: tuple[torch.Tensor, torch.Tensor] | None,
    gates: Gates,
    lists: torch.Tensor | None,
    counts: torch.Tensor | None,
    form: Form,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gated branches' sum, of q's shape and dtype with v's head size.

    Args:
      keys: k, v, k_swa, v_swa.
      pooled: the compressed keys and values; None if there is neither that branch nor a list to choose.
      gates: of each branch.
      lists, counts: of all rows; chosen here if there are none.
      out: where the sum is written, without gradients.
    """
    k, v, k_swa, v_swa = keys
    g_cmp, g_slc, g_swa = gates
    sharing, listing = form.sharing, form.sharing.list_stride
    # A GPU writes and reads branches at less than the price of their products only in 16 bits.
    common: dict[str, Any] = {"scale": form.scale, "out_dtype": None if q.is_cuda else torch.float32}
    branches: list[Branch] = []
    computed = {name: rows.has_anchors or sharing.output_stride(name) == 1 for name in BRANCHES}
    if g_swa is not None:
        at = sharing.output_stride("swa")
        window = {"window": (form.window - 1, None), **common, **rows.of_q_and_k(at)}
        beside = _branch_of_graph(q)
        if not computed["swa"]:
            o_swa = _of_no_rows(q, v)
        elif beside is None:
            o_swa = attention(rows.at(q, at), k_swa, v_swa, **window)
        else:
            with torch.cuda.stream(beside):
                o_swa = attention(rows.at(q, at), k_swa, v_swa, **window)
    lse, at = None, sharing.output_stride("cmp")
    if g_cmp is not None and not computed["cmp"]:
        branches.append(_ungated(_of_no_rows(q, v), g_cmp, rows, "cmp", sharing))
    elif g_cmp is not None:
        assert pooled is not None
        block, stride = form.compression
        o, lse = attention(
            rows.at(q, at),
            pooled[0],
            pooled[1],
            return_lse=True,
            **common,
            **rows.of_q_and_pooled(at, block, stride),
        )
        branches.append(_ungated(o, g_cmp, rows, "cmp", sharing))
        lse = rows.lse_at(lse, listing) if at == 1 else lse if at == listing else None
    counts = None if counts is None else rows.at(counts, listing)
    if listing > 1 and not rows.has_anchors:
        lists = q.new_empty(q.shape[0], 0, k.shape[2], form.slots, dtype=torch.int32)
    elif lists is None:
        assert pooled is not None
        lists = chosen_blocks(rows, q, k, pooled[0], lse, form)
    else:
        # What is no block in 64 bits is none in 32.
        lists = rows.at(lists, listing)[..., : form.slots].clamp(-1, checks.LARGEST).int().contiguous()
    cheap = None
    if g_swa is not None:
        if beside is not None:
            torch.cuda.current_stream(q.device).wait_stream(beside)
        cheap = o_swa if sharing.share == "delta" else None
        branches.append(_ungated(o_swa, g_swa, rows, "swa", sharing))
    at, query_rows = sharing.output_stride("slc"), 1
    if sharing.share == "selection":
        grouped = form.block_size % sharing.stride == 0 and rows.first_is_anchor
        if counts is not None and (rows.carries or not grouped):
            slot = torch.arange(lists.shape[-1], device=lists.device)
            lists, counts = lists.masked_fill(slot >= counts[..., None], -1), None
        if grouped:
            query_rows = sharing.stride
            rows.keep(lists, "lists")
        else:
            lists = rows.with_own_blocks(lists, sharing.stride, form.block_size)
    of_lists = {"block_size": form.block_size, "query_rows": query_rows, **common, **rows.of_q_and_k(at)}
    o = sparse_attention(rows.at(q, at), k, v, lists, counts, **of_lists) if computed["slc"] else _of_no_rows(q, v)
    branches.append(_ungated(o, g_slc, rows, "slc", sharing, cheap))
    return _sum(branches, q.dtype, out)


def _of_no_rows(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What has a row for each anchor, where none is among the rows."""
    return q.new_empty(q.shape[0], 0, q.shape[2], v.shape[-1])


def _branch_of_graph(q: torch.Tensor) -> torch.cuda.Stream | None:
    """Where a CUDA graph is captured without gradients, a stream for what may run beside the rest, as a step of decoding
    alone does not fill a GPU; it has waited for all before."""
    if torch.compiler.is_compiling() or not q.is_cuda or torch.is_grad_enabled():
        return None
    if not torch.cuda.is_current_stream_capturing():
        return None
    # One for each GPU: memory that a stream has freed is used again by that stream alone.
    stream = _streams.setdefault(q.device, torch.cuda.Stream(q.device))
    stream.wait_stream(torch.cuda.current_stream(q.device))
    return stream


_streams: dict[torch.device, torch.cuda.Stream] = {}


def pooled_keys(rows: Rows, k: torch.Tensor, v: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    block, stride = form.compression
    if form.compress is not None:
        return rows.compressed(k, v, block, stride, form.compress)
    cu_seqlens = rows.cu_seqlens_k
    return pool_keys(k, block, stride, cu_seqlens=cu_seqlens), pool_keys(v, block, stride, cu_seqlens=cu_seqlens)


def chosen_blocks(
    rows: Rows, q: torch.Tensor, k: torch.Tensor, k_pooled: torch.Tensor, lse: torch.Tensor | None, form: Form
) -> torch.Tensor:
    """The lists of the rows of list_stride. lse: the compressed branch's at these rows, if it is known."""
    (block, stride), listing = form.compression, form.sharing.list_stride
    with torch.no_grad():
        of_q = rows.of_q(listing)
        of_q.pop("seqused_q", None)  # lists of places that are nobody's row are not read
        return select_blocks(
            rows.at(q, listing),
            k_pooled,
            min(form.slots, -(-rows.keys(k) // form.block_size)),
            lse=lse,
            block_size=form.block_size,
            compression_block=block,
            compression_stride=stride,
            forced=tuple(form.forced),
            scale=form.scale,
            **of_q,
            **rows.of_pooled(block, stride),
        )


def _ungated(
    o: torch.Tensor,
    gate: torch.Tensor | None,
    rows: Rows,
    name: str,
    sharing: Sharing,
    cheap: torch.Tensor | None = None,
) -> Branch:
    """Of a branch, from its output at the rows of its output_stride: what it adds to the result is the product
    (sharing.branch)."""
    stride = sharing.output_stride(name)
    if stride == 1:
        return o, gate
    copies_gated = sharing.share == "output" and sharing.gate == "anchor" and not o.is_cuda and not rows.carries
    if gate is not None and copies_gated:
        return rows.spread(rows.at(gate.float()[..., None], stride) * o, stride, name), None
    o = rows.spread(o, stride, name)
    if sharing.share == "delta":
        assert cheap is not None
        o = (o.float() + (cheap.float() - rows.spread(rows.at(cheap, stride), stride, "swa").float())).to(o.dtype)
    if gate is not None and sharing.gate == "anchor":
        gate = rows.spread(rows.at(gate, stride), stride, "g_" + name)
    return o, gate


def _sum(branches: list[Branch], dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    first, its_gate = branches[0]
    alone = len(branches) == 1 and its_gate is None
    if first.is_cuda and not alone and not transformed():
        gates = [o.new_ones(o.shape[:-1]).float() if gate is None else gate.float() for o, gate in branches]
        return gate_branches([o for o, _ in branches], gates, out).to(dtype)
    gated = (o if gate is None else gate.float()[..., None] * o for o, gate in branches)
    total = functools.reduce(torch.add, gated)
    return total.to(dtype) if out is None else out.copy_(total)
