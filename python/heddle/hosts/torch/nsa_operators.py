"""The torch operators ``heddle::pool_keys*`` and ``heddle::select_blocks``, of native sparse attention, and their
functions."""

from __future__ import annotations

import torch

from ... import _heddle
from ..._options import check_chosen, check_list_length, check_pooled
from .checks import (
    WRITES,
    check_operands,
    check_outputs,
    check_tensors,
    refuse_gradients,
    refuse_tangents,
    without_gradients,
)
from .operators import changed, native, register, returns_nothing
from .transforms import for_transforms, transformed

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")

_SEQUENCES = "SymInt block, SymInt stride, Tensor? cu_seqlens, Tensor? seqused"

_LIBRARY.define(f"pool_keys(Tensor x, {_SEQUENCES}) -> Tensor")
_LIBRARY.define(f"pool_keys_out(Tensor x, {_SEQUENCES}, Tensor(a!) out) -> ()")
_LIBRARY.define(
    "extend_pooled_keys(Tensor x, Tensor(a!) k_pooled, SymInt block, SymInt stride, Tensor seqused, SymInt appended, "
    "Tensor? page_table=None) -> ()"
)
# rows: of dx, which has the other extents of d_pooled.
_LIBRARY.define(f"pool_keys_backward(Tensor d_pooled, SymInt rows, {_SEQUENCES}) -> Tensor")
# forced: bits of the first, the previous and the current block.
_CHOICE = (
    "SymInt block_size, SymInt? compression_block, SymInt? compression_stride, int forced, float? scale, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? page_table, Tensor? q_offset, SymInt q_step, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_LIBRARY.define(f"select_blocks(Tensor q, Tensor k_pooled, SymInt n, Tensor? lse, {_CHOICE}) -> Tensor")
# Lists are as long as out's.
_LIBRARY.define(f"select_blocks_out(Tensor q, Tensor k_pooled, Tensor? lse, Tensor(a!) out, {_CHOICE}) -> ()")


def _with_rows(operation, name, x, rows, cu_seqlens):
    """A new tensor like x with so many rows."""
    check_pooled(x.shape, cu_seqlens is not None, operation, name)
    return torch.empty((*x.shape[:-3], rows, *x.shape[-2:]), dtype=x.dtype, device=x.device)


def _pool_fake(x, block, stride, cu_seqlens, seqused):
    if stride < 1:
        raise ValueError(f"[pool_keys] stride is {stride}: it must be at least 1")
    keys = x.shape[-3] if x.dim() >= 3 else 0
    rows = torch.sym_max(0, (keys - block) // stride + 1) if cu_seqlens is None else keys // stride
    return _with_rows("pool_keys", "x", x, rows, cu_seqlens)


def _pool(x, block, stride, cu_seqlens, seqused):
    pooled = _pool_fake(x, block, stride, cu_seqlens, seqused)
    native(_heddle.pool_keys, x, pooled, block, stride, cu_seqlens, seqused)
    return pooled


def _pool_out(x, block, stride, cu_seqlens, seqused, out):
    native(_heddle.pool_keys, x, out, block, stride, cu_seqlens, seqused)
    changed(out)


def _extend(x, k_pooled, block, stride, seqused, appended, page_table=None):
    native(_heddle.extend_pooled_keys, x, k_pooled, block, stride, seqused, appended, page_table)
    changed(k_pooled)


def _pool_backward_fake(d_pooled, rows, block, stride, cu_seqlens, seqused):
    return _with_rows("pool_keys_backward", "d_pooled", d_pooled, rows, cu_seqlens)


def _pool_gradient(d_pooled, rows, block, stride, cu_seqlens, seqused):
    dx = _pool_backward_fake(d_pooled, rows, block, stride, cu_seqlens, seqused)
    native(_heddle.pool_keys_backward, d_pooled, dx, block, stride, cu_seqlens, seqused)
    return dx


def _save_for_backward(ctx, inputs, output):
    x, ctx.block, ctx.stride, cu_seqlens, seqused = inputs
    ctx.rows = x.shape[-3]
    ctx.save_for_backward(cu_seqlens, seqused)


def _backward(ctx, d_pooled):
    refuse_tangents("pool_keys_backward", ("d_pooled",), (d_pooled,))
    operator = _PoolBackwardForTransforms.apply if transformed() else torch.ops.heddle.pool_keys_backward
    return operator(d_pooled, ctx.rows, ctx.block, ctx.stride, *ctx.saved_tensors), None, None, None, None


# Pooling is linear, and the gradient of its gradient is pooling.
def _save_for_second(ctx, inputs, output):
    _, _, ctx.block, ctx.stride, cu_seqlens, seqused = inputs
    ctx.save_for_backward(cu_seqlens, seqused)


def _second(ctx, dx):
    refuse_tangents("pool_keys_backward", ("dx",), (dx,))
    operator = _PoolForTransforms.apply if transformed() else torch.ops.heddle.pool_keys
    return operator(dx, ctx.block, ctx.stride, *ctx.saved_tensors), None, None, None, None, None


_PoolForTransforms = for_transforms("pool_keys", _save_for_backward, _backward)
_PoolBackwardForTransforms = for_transforms("pool_keys_backward", _save_for_second, _second)


def _select_fake(q, k_pooled, n, lse, block_size, block, stride, forced, scale, cu_q, cu_k, *rest):
    check_chosen(q.shape, k_pooled.shape, cu_q is not None, cu_k is not None)
    if n < 0:
        raise ValueError(f"[select_blocks] n is {n}: it must be at least 0")
    return torch.empty((*q.shape[:-2], k_pooled.shape[-2], n), dtype=torch.int32, device=q.device)


def _select(q, k_pooled, n, lse, *options):
    blocks = _select_fake(q, k_pooled, n, lse, *options)
    native(_heddle.select_blocks, q, k_pooled, lse, blocks, *options)
    return blocks


def _select_out(q, k_pooled, lse, out, *options):
    native(_heddle.select_blocks, q, k_pooled, lse, out, *options)
    changed(out)


register(_LIBRARY, "pool_keys", _pool, _pool_fake)
register(_LIBRARY, "pool_keys_out", _pool_out, returns_nothing, without_backward=True)
register(_LIBRARY, "extend_pooled_keys", _extend, returns_nothing, without_backward=True)
register(_LIBRARY, "pool_keys_backward", _pool_gradient, _pool_backward_fake)
register(_LIBRARY, "select_blocks", _select, _select_fake)
register(_LIBRARY, "select_blocks_out", _select_out, returns_nothing, without_backward=True)
torch.library.register_autograd("heddle::pool_keys", _backward, setup_context=_save_for_backward, lib=_LIBRARY)
torch.library.register_autograd("heddle::pool_keys_backward", _second, setup_context=_save_for_second, lib=_LIBRARY)


def pool_keys(x, block, stride, cu_seqlens, seqused, out=None):
    """See heddle.nsa.pool_keys."""
    check_operands("pool_keys", ("x",), (x,))
    check_tensors("pool_keys", ("cu_seqlens", "seqused"), (cu_seqlens, seqused))
    if out is not None:
        check_outputs("pool_keys", out)
        refuse_gradients("pool_keys", ("x", "out"), (x, out), WRITES)
        without_gradients(torch.ops.heddle.pool_keys_out.default, x, block, stride, cu_seqlens, seqused, out)
        return out
    refuse_tangents("pool_keys", ("x",), (x,))
    operator = _PoolForTransforms.apply if transformed() else torch.ops.heddle.pool_keys
    return operator(x, block, stride, cu_seqlens, seqused)


def extend_pooled_keys(x, k_pooled, block, stride, seqused, appended, page_table):
    """See heddle.nsa.extend_pooled_keys."""
    name = "extend_pooled_keys"
    check_operands(name, ("x", "k_pooled"), (x, k_pooled))
    check_tensors(name, ("seqused", "page_table"), (seqused, page_table))
    refuse_gradients(name, ("x", "k_pooled"), (x, k_pooled))
    torch.ops.heddle.extend_pooled_keys(x, k_pooled, block, stride, seqused, appended, page_table)


def select_blocks(q, k_pooled, n, lse, sizes, forced, scale, sequences, q_offset, q_step, longest, out=None):
    """See heddle.nsa.select_blocks. sizes: block_size, compression_block and compression_stride; sequences: cu_seqlens_q,
    cu_seqlens_k, seqused_k and page_table; longest: max_seqlen_q and max_seqlen_k, 0 where not given."""
    check_operands("select_blocks", ("q", "k_pooled"), (q, k_pooled))
    names = ("lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")
    check_tensors("select_blocks", names, (lse, *sequences))
    if isinstance(q_offset, int) and q.dim() > 0:
        count = q.shape[0] if sequences[0] is None else sequences[0].numel() - 1
        q_offset = torch.full((count,), q_offset, dtype=torch.int32, device=q.device)
    check_tensors("select_blocks", ("q_offset",), (q_offset,))
    options = (*sizes, forced, scale, *sequences, q_offset, q_step, *longest)
    if out is not None:
        check_outputs("select_blocks", out)
        check_list_length(out.shape, n)
        refuse_gradients("select_blocks", ("q", "k_pooled", "lse", "out"), (q, k_pooled, lse, out), WRITES)
        without_gradients(torch.ops.heddle.select_blocks_out.default, q, k_pooled, lse, out, *options)
        return out
    # Lists have no gradient, so autograd is not asked.
    q, k_pooled, lse = (x if x is None else x.detach() for x in (q, k_pooled, lse))
    return torch.ops.heddle.select_blocks(q, k_pooled, n, lse, *options)
