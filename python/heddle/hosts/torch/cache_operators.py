"""The torch operators ``heddle::*`` of rotary embedding and of caches."""

from __future__ import annotations

import torch

from ... import _heddle
from ..._options import K_SCALE, V_SCALE, check_rank, schema
from .checks import refuse_tangents
from .operators import changed, empty_lse, empty_out, native, native_items, register, returns_nothing
from .transforms import for_transforms, transformed

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")

_LIBRARY.define("apply_rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, Tensor? offsets) -> Tensor")
_LIBRARY.define(
    "apply_rotary_out(Tensor x, Tensor cos, Tensor sin, bool interleaved, Tensor? offsets, Tensor(a!) out) -> ()"
)
_LIBRARY.define(
    "append_kv_cache(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor seqlens, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cos, Tensor? sin, bool interleaved, "
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()"
)

# Scales for each slot of a cache are written.
_CACHE_OPTIONS = schema({"k_scale": "(c!)", "v_scale": "(d!)"})
_LIBRARY.define(
    "attention_with_kv_cache(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cos, "
    f"Tensor? sin, bool interleaved, {_CACHE_OPTIONS}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_with_kv_cache_out(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cos, "
    f"Tensor? sin, bool interleaved, Tensor(e!) out, Tensor(f!)? lse_out, {_CACHE_OPTIONS}) -> ()"
)
_LIBRARY.define(
    "append_int4_cache(Tensor k_new, Tensor v_new, Tensor(a!) blocks, Tensor(b!) k_tail, Tensor(c!) v_tail, "
    "Tensor? block_table, Tensor? row_idx, Tensor seqlens, Tensor? cos, Tensor? sin, bool interleaved) -> ()"
)
_LIBRARY.define(
    "attention_over_int4_cache(Tensor q, Tensor blocks, Tensor k_tail, Tensor v_tail, Tensor? block_table, "
    f"Tensor? row_idx, {schema()}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_over_int4_cache_out(Tensor q, Tensor blocks, Tensor k_tail, Tensor v_tail, Tensor? block_table, "
    f"Tensor? row_idx, Tensor(a!) out, Tensor(b!)? lse_out, {schema()}) -> ()"
)


def _rotary_fake(x, cos, sin, interleaved, offsets):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rotary(x, cos, sin, interleaved, offsets):
    out = _rotary_fake(x, cos, sin, interleaved, offsets)
    native(_heddle.apply_rotary, x, out, cos, sin, interleaved, offsets)
    return out


def _rotary_out(x, cos, sin, interleaved, offsets, out):
    native(_heddle.apply_rotary, x, out, cos, sin, interleaved, offsets)
    changed(out)


def _rotary_save(ctx, inputs, output):
    _, cos, sin, ctx.interleaved, offsets = inputs
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("[apply_rotary] cos or sin requires a gradient: they have none; detach them")
    ctx.save_for_backward(cos, sin, offsets)


def _rotary_backward(ctx, d_out):
    cos, sin, offsets = ctx.saved_tensors
    refuse_tangents("apply_rotary", ("d_out",), (d_out,))
    # The inverse of a rotation is the rotation by the opposite angle.
    return rotary_operator()(d_out, cos, -sin, ctx.interleaved, offsets), None, None, None, None


_RotaryForTransforms = for_transforms("apply_rotary", _rotary_save, _rotary_backward)


def rotary_operator():
    return _RotaryForTransforms.apply if transformed() else torch.ops.heddle.apply_rotary


def _append(
    k_new,
    v_new,
    k_cache,
    v_cache,
    seqlens,
    page_table,
    cache_batch_idx,
    cos,
    sin,
    interleaved,
    k_scale=None,
    v_scale=None,
):
    native(
        _heddle.append_kv_cache,
        k_new,
        v_new,
        k_cache,
        v_cache,
        seqlens,
        page_table,
        cache_batch_idx,
        cos,
        sin,
        interleaved,
        k_scale,
        v_scale,
    )
    changed(k_cache, v_cache, k_scale, v_scale)


def _cached_fake(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, *options):
    check_rank(q.shape, False)
    return empty_out(q, v_cache, options), empty_lse(q, False)


def _attend(operands, interleaved, out, lse, options):
    q, k_new, v_new, k_cache, v_cache, cos, sin = operands
    native(
        _heddle.attention_with_kv_cache,
        q,
        k_new,
        v_new,
        k_cache,
        v_cache,
        out,
        lse,
        cos,
        sin,
        interleaved,
        native_items(options),
    )
    changed(k_cache, v_cache, options[K_SCALE], options[V_SCALE])


def _cached(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, *options):
    check_rank(q.shape, False)
    out, lse = empty_out(q, v_cache, options), empty_lse(q, False)
    _attend((q, k_new, v_new, k_cache, v_cache, cos, sin), interleaved, out, lse, options)
    return out, lse


def _cached_out(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, out, lse_out, *options):
    _attend((q, k_new, v_new, k_cache, v_cache, cos, sin), interleaved, out, lse_out, options)
    changed(out, lse_out)


def _append_int4(k_new, v_new, blocks, k_tail, v_tail, *rest):
    native(_heddle.append_int4_cache, k_new, v_new, blocks, k_tail, v_tail, *rest)
    changed(blocks, k_tail, v_tail)


def _over_int4_fake(q, blocks, k_tail, v_tail, block_table, row_idx, *options):
    check_rank(q.shape, False)
    return empty_out(q, v_tail, options), empty_lse(q, False)


def _over_int4_out(q, blocks, k_tail, v_tail, block_table, row_idx, out, lse_out, *options):
    items = native_items(options)
    native(_heddle.attention_over_int4_cache, q, blocks, k_tail, v_tail, block_table, row_idx, out, lse_out, items)
    changed(out, lse_out)


def _over_int4(q, blocks, k_tail, v_tail, block_table, row_idx, *options):
    out, lse = _over_int4_fake(q, blocks, k_tail, v_tail, block_table, row_idx, *options)
    _over_int4_out(q, blocks, k_tail, v_tail, block_table, row_idx, out, lse, *options)
    return out, lse


register(_LIBRARY, "apply_rotary", _rotary, _rotary_fake)
torch.library.register_autograd("heddle::apply_rotary", _rotary_backward, setup_context=_rotary_save, lib=_LIBRARY)
for _name, _kernel, _fake in (
    ("apply_rotary_out", _rotary_out, returns_nothing),
    ("append_kv_cache", _append, returns_nothing),
    ("attention_with_kv_cache", _cached, _cached_fake),
    ("attention_with_kv_cache_out", _cached_out, returns_nothing),
    ("append_int4_cache", _append_int4, returns_nothing),
    ("attention_over_int4_cache", _over_int4, _over_int4_fake),
    ("attention_over_int4_cache_out", _over_int4_out, returns_nothing),
):
    register(_LIBRARY, _name, _kernel, _fake, without_backward=True)
