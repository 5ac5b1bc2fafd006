"""Caches of keys and values: rotary embedding, appending, and decoding in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from ._options import check_lse_out, flag, pack
from .hosts import arrays, is_torch, torch_host

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._types import AnyArray, Array, CacheOptions


def apply_rotary(
    x: Array,
    cos: AnyArray,
    sin: AnyArray,
    *,
    interleaved: bool = False,
    offsets: AnyArray | None = None,
    out: Array | None = None,
) -> Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864).

    Args:
      x: [B, S, H, D]; row i of sequence b stands at position offsets[b] + i.
      cos, sin: [max_position, R / 2], R <= D even, float32 or x's dtype; dimensions R to D pass through. No gradient.
      interleaved: rotate pairs (0, 1), (2, 3), ... (GPT-J); else (0, R / 2), (1, R / 2 + 1), ... (GPT-NeoX).
      offsets: int32 [B]; 0 if None.
      out: where to write the result, which is then the one that is returned: of x's shape, dtype and device; may be x
        itself, else apart from what is read. Without gradients.

    Returns:
      The rotated x, contiguous; for torch tensors with the gradient of x.

    Raises:
      ValueError: a bad argument, such as a position outside the table, or a tensor that requires a gradient beside out. On a GPU positions are not read before; the
        table's nearest row serves those outside.
    """
    interleaved = flag("apply_rotary", "interleaved", interleaved)
    if is_torch(x):
        return torch_host().apply_rotary(x, cos, sin, interleaved, offsets, out)
    return arrays.apply_rotary(x, cos, sin, interleaved, offsets, out)


def append_kv_cache(
    k_new: AnyArray,
    v_new: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    seqlens: AnyArray,
    *,
    page_table: AnyArray | None = None,
    cache_batch_idx: AnyArray | None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    interleaved: bool = False,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
) -> None:
    """Writes new keys and values into a cache, in place, at positions seqlens[b] .. seqlens[b] + Sn - 1.

    Args:
      k_new, v_new: [B, Sn, Hkv, D], [B, Sn, Hkv, Dv].
      k_cache, v_cache: [Bc, Smax, Hkv, D or Dv], or pages [pages, page_size, Hkv, D or Dv] with page_table.
      seqlens: int32 [B], keys already in the cache; not changed.
      page_table: int32 [B, max_pages]. cache_batch_idx: int32 [B], each sequence's row of the cache.
      rotary_cos, rotary_sin, interleaved: rotate k_new by its position first; see apply_rotary.
      k_scale, v_scale: of a torch.float8_e4m3fn cache, float32: it holds values / scale, rounded to nearest even and
        saturating. [1, 1, Hkv or 1]: read. The cache's shape without its last extent: one for each slot and head, which
        is written, the row's largest magnitude / 448. 1 if None.

    Raises:
      ValueError: a bad argument, a position or page out of range, or, unless torch's gradients are off, a tensor that
        requires one: what is written would have none. Nothing has been written. On a GPU positions and
        pages are not read before; rows outside the cache are dropped.
    """
    interleaved = flag("append_kv_cache", "interleaved", interleaved)
    if is_torch(k_cache):
        return torch_host().append_kv_cache(
            k_new,
            v_new,
            k_cache,
            v_cache,
            seqlens,
            page_table,
            cache_batch_idx,
            rotary_cos,
            rotary_sin,
            interleaved,
            k_scale,
            v_scale,
        )
    return arrays.append_kv_cache(
        k_new,
        v_new,
        k_cache,
        v_cache,
        seqlens,
        page_table,
        cache_batch_idx,
        rotary_cos,
        rotary_sin,
        interleaved,
        k_scale,
        v_scale,
    )


@overload
def attention_with_kv_cache(
    q: Array,
    k_new: AnyArray,
    v_new: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    seqlens: AnyArray,
    *,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    interleaved: bool = False,
    return_lse: Literal[False] = False,
    out: AnyArray | None = None,
    lse_out: AnyArray | None = None,
    **options: Unpack[CacheOptions],
) -> Array: ...
@overload
def attention_with_kv_cache(
    q: Array,
    k_new: AnyArray,
    v_new: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    seqlens: AnyArray,
    *,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    interleaved: bool = False,
    return_lse: Literal[True],
    out: AnyArray | None = None,
    lse_out: AnyArray | None = None,
    **options: Unpack[CacheOptions],
) -> tuple[Array, Array]: ...
@overload
def attention_with_kv_cache(
    q: Array,
    k_new: AnyArray,
    v_new: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    seqlens: AnyArray,
    *,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    interleaved: bool = False,
    return_lse: bool,
    out: AnyArray | None = None,
    lse_out: AnyArray | None = None,
    **options: Unpack[CacheOptions],
) -> Array | tuple[Array, Array]: ...
def attention_with_kv_cache(
    q: Any,
    k_new: AnyArray,
    v_new: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    seqlens: AnyArray,
    *,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    interleaved: bool = False,
    return_lse: bool = False,
    out: AnyArray | None = None,
    lse_out: AnyArray | None = None,
    **options: Any,
) -> Any:
    """One step of decoding: ``append_kv_cache``, rotary embedding of q, and ``attention`` over the longer cache.

    One launch where a candidate writes new keys itself; otherwise one after the other. For inference: no gradient.

    Args:
      q: [B, Sq, H, D].
      k_new, v_new: [B, Sn, Hkv, D], [B, Sn, Hkv, Dv], written in place to k_cache, v_cache at positions seqlens[b] on.
      k_cache, v_cache: [Bc, Smax, Hkv, D or Dv], or pages [pages, page_size, Hkv, D or Dv] with page_table; may be
        torch.float8_e4m3fn beside 16-bit q, then with k_scale, v_scale of [1, 1, Hkv or 1], or of one for each slot and
        head, those of the new keys being written; see append_kv_cache.
      seqlens: int32 [B], keys in the cache before the append; not changed. seqlens[b] + Sn keys are attended.
      rotary_cos, rotary_sin, interleaved: rotate k_new by its position, and q: row i by seqlens[b] + i if causal or
        windowed, else each row by seqlens[b]; see apply_rotary.
      out, lse_out: where to write the results, as for ``attention``.
      options: those of ``attention``, except cu_seqlens_q, cu_seqlens_k and seqused_k.

    Returns:
      out [B, Sq, H, Dv], with return_lse a pair with lse, float32 [B, H, Sq].

    Raises:
      ValueError: a bad argument, or a tensor that requires a gradient: there is no backward, so make the call under
        ``torch.no_grad()`` or detach it. Nothing has been written. On a GPU positions and pages are not read before:
        rows outside the cache are dropped.
    """
    interleaved = flag("attention_with_kv_cache", "interleaved", interleaved)
    return_lse = flag("attention_with_kv_cache", "return_lse", return_lse)
    check_lse_out("attention_with_kv_cache", return_lse, lse_out)
    for name in ("bias", "mask"):
        if (x := options.get(name)) is not None and len(x.shape) < 4:
            options[name] = x[(None,) * (4 - len(x.shape))]
    items = pack(seqused_k=seqlens, **options)
    path = torch_host() if is_torch(q) else arrays
    return path.attention_with_kv_cache(
        q, k_new, v_new, k_cache, v_cache, rotary_cos, rotary_sin, interleaved, items, return_lse, out, lse_out
    )
