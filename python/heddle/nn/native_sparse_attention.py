"""The layer of native sparse attention of heddle.nn, which is its public name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..kv_cache import apply_rotary
from ..nsa import Cache, SharingOptions, checks, nsa_with_cache, parallel_nsa
from ..nsa.cache import OWN_KEYS
from ..nsa.sharing import Sharing, checked_sharing
from .block_compression import BlockCompression
from .linear import Linear

if TYPE_CHECKING:
    from .._types import CompressionName, OwnKeyName

COMPRESSIONS: tuple[CompressionName, ...] = ("mean", "learned")


class NativeSparseAttention(nn.Module):
    """Causal self-attention by native sparse attention (Yuan et al., arXiv 2502.11089) over x [B, T, dim], with its
    projections: ``qkv``, ``gates`` (three for each head, by a sigmoid), ``out``.

    Args:
      dim, heads, kv_heads, head_dim: the width of x, query heads, key/value heads (heads if None), and a head's size
        (dim / heads if None).
      block_size, block_counts, window_size: keys of a block, blocks of a row's list, keys of the window (0: none).
      compression_block, compression_stride: keys of a pooled key, and from one to the next; block_size if None, and each other.
      compression: "mean", or "learned" by a ``heddle.nn.BlockCompression``, which is then ``compress``.
      own_keys: which of the branches "cmp" and "swa" have keys and values of their own, of qkv; the paper's form is both.
      rope_theta: the base of the rotary embedding of q and k, over whole heads; None: none.
      bias: whether qkv and out have one.
      sharing: what rows take from the anchor of a query stride: the arguments query_stride, share, share_branches and gate,
        as ``heddle.nsa.presets`` has them.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        block_size: int = 64,
        block_counts: int = 16,
        window_size: int = 512,
        compression_block: int | None = None,
        compression_stride: int | None = None,
        compression: CompressionName = "mean",
        own_keys: Iterable[OwnKeyName] = (),
        rope_theta: float | None = 10000.0,
        bias: bool = False,
        sharing: SharingOptions | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads != 0 or (head_dim is None and dim % heads != 0):
            raise ValueError(
                f"[NativeSparseAttention] dim is {dim}, heads {heads}, kv_heads {kv_heads}: kv_heads must divide heads, and "
                "heads dim where no head_dim is given"
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads if head_dim is None else head_dim
        if rope_theta is not None and self.head_dim % 2 != 0:
            raise ValueError(f"[NativeSparseAttention] head_dim is {self.head_dim}: with rope_theta it must be even")
        self.block_size, self.block_counts, self.window_size = block_size, block_counts, window_size
        self.compression_block = block_size if compression_block is None else compression_block
        self.compression_stride = self.compression_block if compression_stride is None else compression_stride
        self.rope_theta, self.sharing = rope_theta, sharing
        checks.one_of("NativeSparseAttention", "compression", compression, COMPRESSIONS)
        own = checks.some_of("NativeSparseAttention", "own_keys", own_keys, OWN_KEYS)
        self.own_keys = tuple(branch for branch in OWN_KEYS if branch in own)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        # Rows of q, of every branch's k, then of every branch's v: those of the lists, then of own_keys.
        self.qkv = Linear(dim, (heads + 2 * self._sets * kv_heads) * self.head_dim, bias, **made)
        self.compress = None
        if compression == "learned":
            self.compress = BlockCompression(self.head_dim, self.compression_block, **made)
        self.gates = Linear(dim, 3 * heads, True, **made)
        self.out = Linear(heads * self.head_dim, dim, bias, **made)

    @property
    def _sets(self) -> int:
        """Of keys and values."""
        return 1 + len(self.own_keys)

    @property
    def _sharing(self) -> Sharing:
        return (
            Sharing()
            if self.sharing is None
            else checked_sharing("NativeSparseAttention", **self.sharing, window_size=None)
        )

    def cache(self, batch: int, capacity: int, *, page_size: int | None = None, pages: int | None = None) -> Cache:
        """An empty cache for ``batch`` sequences of at most ``capacity`` positions, of the layer's dtype and device; in pages as
        ``heddle.nsa.Cache`` has them."""
        like = self.gates.bias  # floats, whatever format weights have
        assert like is not None
        shared: dict[str, Any] = {**(self.sharing or {})}
        return Cache(
            batch,
            capacity,
            self.kv_heads,
            self.head_dim,
            block=self.compression_block,
            stride=self.compression_stride,
            query_heads=self.heads,
            block_counts=self.block_counts,
            compress=self.compress,
            own_keys=self.own_keys,
            page_size=page_size,
            pages=pages,
            **shared,
            dtype=like.dtype,
            device=like.device,
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Cache | None = None,
        phase: int | None = None,
    ) -> torch.Tensor:
        """
        Args:
          x: [B, T, dim]; with cu_seqlens [1, T, dim].
          cu_seqlens: int32 or int64 [N + 1], starts of packed sequences, from 0 to T.
          max_seqlen: no packed sequence is longer; without it cu_seqlens is read, which on a GPU waits for it.
          cache: x holds each sequence's next T positions; their keys are appended. Without gradients. It shares as the layer
            does, as ``layer.cache`` makes it.
          phase: with a cache, cache.lengths modulo the query stride, where all sequences are known to have the same; see
            ``heddle.nsa.nsa_with_cache``.

        Returns:
          [B, T, dim].
        """
        if cache is not None and cu_seqlens is not None:
            raise ValueError(
                "[NativeSparseAttention] cu_seqlens is given beside cache: rows of a cache are batched, each its own"
            )
        if cache is not None and cache.sharing != self._sharing:
            raise ValueError(
                f"[NativeSparseAttention] cache shares otherwise than the layer, {cache.sharing} and not {self._sharing}: make "
                "it with layer.cache"
            )
        if cache is not None:
            self._check_blocks(cache)
        if cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
            raise TypeError(
                f"[NativeSparseAttention] cu_seqlens is a {type(cu_seqlens).__name__}: it must be a torch tensor"
            )
        of_keys = self._sets * self.kv_heads
        turned, of_v = (
            self.qkv(x)
            .unflatten(-1, (self.heads + 2 * of_keys, self.head_dim))
            .split((self.heads + of_keys, of_keys), 2)
        )
        if self.rope_theta is not None:
            turned = self._rotated(turned, cu_seqlens, cache)
        q, of_k = turned.split((self.heads, of_keys), 2)
        (k, *own_k), (v, *own_v) = (y.split(self.kv_heads, 2) for y in (of_k, of_v))
        own = {f"k_{branch}": y for branch, y in zip(self.own_keys, own_k)}
        own |= {f"v_{branch}": y for branch, y in zip(self.own_keys, own_v)}
        g_cmp, g_slc, g_swa = torch.sigmoid(self.gates(x)).unflatten(-1, (3, self.heads)).unbind(-2)
        form: dict[str, Any] = {
            "block_counts": self.block_counts,
            "block_size": self.block_size,
            "window_size": self.window_size,
        }
        if cache is not None:
            dtype = cache.k.dtype  # autocast may have given others
            q, k, v = (y.to(dtype) for y in (q, k, v))
            own = {name: y.to(dtype) for name, y in own.items()}
            o = nsa_with_cache(q, k, v, cache, g_cmp, g_slc, g_swa, phase=phase, **own, **form)
        else:
            form.update(self.sharing or {})
            o = parallel_nsa(
                q,
                k,
                v,
                g_cmp,
                g_slc,
                g_swa,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                compression_block=self.compression_block,
                compression_stride=self.compression_stride,
                compress=self.compress,
                **own,
                **form,
            )
        return self.out(o.flatten(2))

    def _check_blocks(self, cache: Cache) -> None:
        """A cache compresses blocks itself, as it goes: one of another layer would do it by that one's weights."""
        blocks = self.compression_block, self.compression_stride
        if (cache.block, cache.stride) != blocks or cache.compress is not self.compress:
            raise ValueError(
                f"[NativeSparseAttention] cache has blocks of {cache.block} keys, every {cache.stride}, compressed "
                f"{_compressed_by(cache.compress)}, and the layer of {blocks[0]}, every {blocks[1]}, "
                f"{_compressed_by(self.compress)}: make it with this layer's cache()"
            )

    def _rotated(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: Cache | None) -> torch.Tensor:
        """x [B, T, heads, head_dim], each row turned by its position."""
        batch, length = x.shape[:2]
        assert self.rope_theta is not None
        inverse = self.rope_theta ** (torch.arange(0, self.head_dim, 2, device=x.device).float() / -self.head_dim)
        position = torch.arange(length, device=x.device)
        if cu_seqlens is None and cache is None:
            angles = position[:, None] * inverse
            return apply_rotary(x, angles.cos(), angles.sin())
        if cache is not None:
            position = cache.lengths[:, None] + position
        else:
            assert cu_seqlens is not None
            sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), position.to(cu_seqlens.dtype), right=True)
            position = position - cu_seqlens[sequence]
        # A table row for each row of x, which is then a sequence of its own.
        angles = position.reshape(-1)[:, None] * inverse
        own = torch.arange(batch * length, dtype=torch.int32, device=x.device)
        turned = apply_rotary(x.reshape(batch * length, 1, *x.shape[2:]), angles.cos(), angles.sin(), offsets=own)
        return turned.view(x.shape)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, block_size={self.block_size}, "
            f"block_counts={self.block_counts}, window_size={self.window_size}"
        )


def _compressed_by(compress: Any) -> str:
    return "by their means" if compress is None else f"by a {type(compress).__name__} of its own"
