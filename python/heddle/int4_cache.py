"""A cache of keys and values in 4 bits, whose newest keys stay in 16 bits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _heddle
from ._options import DROPOUT_SEED, check_lse_out, flag, pack
from .explanation import Candidate, Explanation, gpu_name
from .hosts import is_torch, torch_host

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ._types import GpuName, Int4CacheOptions

TAIL = 128  # slots of a ring


@dataclasses.dataclass
class Int4Cache:
    """Keys and values of B sequences, about 4.5 bits a number: blocks of 64 keys in 4 bits, K with a scale and a zero for
    each channel, V with one for each key and 64 channels (KIVI: Liu et al., arXiv 2402.02750), and the newest 64 to 127
    keys in a ring of 128 slots. Torch tensors, on the CPU or a GPU; for inference: a tensor that requires a gradient is a
    ValueError, unless torch's gradients are off.

    A sequence may be cut short as far as its number of blocks, ``Int4Cache.blocks_of(keys)``, stays.

    Attributes:
      blocks: uint8 [rows, max_blocks, Hkv, bytes], or pages [pages, Hkv, bytes] with page_table; bytes is
        ``Int4Cache.block_bytes(D, Dv)``.
      k_tail, v_tail: float16 or bfloat16 [rows, 128, Hkv, D], [rows, 128, Hkv, Dv].
      page_table: int32 [B, max_blocks], the page of each block.
      row_idx: int32 [B], the row of the rings (and of blocks without a table) that each sequence has; b if None.
    """

    blocks: torch.Tensor
    k_tail: torch.Tensor
    v_tail: torch.Tensor
    page_table: torch.Tensor | None = None
    row_idx: torch.Tensor | None = None

    @staticmethod
    def block_bytes(head_size: int, value_size: int | None = None) -> int:
        """Bytes of 64 keys and values of one head; head sizes are multiples of 64 up to 256."""
        return _heddle.int4_cache_block_bytes(head_size, head_size if value_size is None else value_size)

    @staticmethod
    def blocks_of(keys: int) -> int:
        """Blocks of a sequence of so many keys; the others are in the ring."""
        return _heddle.int4_cache_blocks(keys)

    @classmethod
    def empty(
        cls,
        sequences: int,
        max_keys: int,
        kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> Int4Cache:
        """A cache without pages for sequences of up to max_keys keys; dtype: of the rings, bfloat16 if None."""
        import torch

        value_size = head_size if value_size is None else value_size
        dtype = torch.bfloat16 if dtype is None else dtype
        size = cls.block_bytes(head_size, value_size)
        blocks = torch.zeros(sequences, cls.blocks_of(max_keys), kv_heads, size, dtype=torch.uint8, device=device)
        tails = (torch.zeros(sequences, TAIL, kv_heads, d, dtype=dtype, device=device) for d in (head_size, value_size))
        return cls(blocks, *tails)

    def append(
        self,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        seqlens: torch.Tensor,
        *,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        interleaved: bool = False,
    ) -> None:
        """Appends k_new [B, Sn, Hkv, D] and v_new [B, Sn, Hkv, Dv] behind the seqlens[b] keys (int32 [B], not changed) that
        each sequence has, rotating k_new by its position if rotary_cos and rotary_sin are given (see ``apply_rotary``).

        Keys move into a block as soon as 64 newer ones are there. What is not finite makes its group NaN; what is beyond
        float16 saturates.

        Raises:
          ValueError: a bad argument; nothing has been written. On a GPU lengths, rows and pages are not read before: a
            sequence that would grow too long is left as it is, rows and pages outside the cache are dropped.
        """
        interleaved = flag("append_int4_cache", "interleaved", interleaved)
        torch_host().append_int4_cache(
            k_new,
            v_new,
            self.blocks,
            self.k_tail,
            self.v_tail,
            self.page_table,
            self.row_idx,
            seqlens,
            rotary_cos,
            rotary_sin,
            interleaved,
        )

    def explain_append(
        self,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        seqlens: torch.Tensor,
        *,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        interleaved: bool = False,
        gpu: GpuName | None = None,
    ) -> Explanation:
        """The candidates for ``append`` with these arguments and which one would run; nothing is written. gpu: answer as a
        machine with that GPU would, which need not be here; see ``heddle.explain``."""
        interleaved = flag("explain_append_int4_cache", "interleaved", interleaved)
        torch_host()
        rotary = (rotary_cos, rotary_sin, interleaved)
        found = _heddle.explain_append_int4_cache(k_new, v_new, *self._tensors(), seqlens, *rotary, gpu_name(gpu))
        return Explanation(Candidate(*parts) for parts in found)

    def explain_attention(
        self, q: torch.Tensor, seqlens: torch.Tensor, *, gpu: GpuName | None = None, **options: Unpack[Int4CacheOptions]
    ) -> Explanation:
        """The candidates for ``attention`` of q [B, Sq, H, D] with these arguments and which one would run. Data is not read,
        except index data on the CPU.

        Args:
          q, seqlens, options: as ``attention`` takes them.
          gpu: answer as a machine with that GPU would, which need not be here; see ``heddle.explain``.

        Raises:
          ValueError: a bad argument, as ``attention`` would refuse it; a gpu that is not known, listing those that are.
        """
        torch_host()
        items = list(_attention_items(seqlens, dict(options)))
        if is_torch(items[DROPOUT_SEED]):
            items[DROPOUT_SEED] = None  # its value chooses nothing
        found = _heddle.explain_attention_over_int4_cache(q, *self._tensors(), tuple(items), gpu_name(gpu))
        return Explanation(Candidate(*parts) for parts in found)

    @overload
    def attention(
        self,
        q: torch.Tensor,
        seqlens: torch.Tensor,
        *,
        return_lse: Literal[False] = False,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
        **options: Unpack[Int4CacheOptions],
    ) -> torch.Tensor: ...
    @overload
    def attention(
        self,
        q: torch.Tensor,
        seqlens: torch.Tensor,
        *,
        return_lse: Literal[True],
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
        **options: Unpack[Int4CacheOptions],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def attention(
        self,
        q: torch.Tensor,
        seqlens: torch.Tensor,
        *,
        return_lse: bool,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
        **options: Unpack[Int4CacheOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    def attention(
        self,
        q: torch.Tensor,
        seqlens: torch.Tensor,
        *,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """``heddle.attention`` of q [B, Sq, H, D] over the seqlens[b] keys (int32 [B]) that each sequence has.

        out, lse_out: where to write the results, as for ``attention``.
        options: those of ``attention``, except seqused_k, page_table, cache_batch_idx, cu_seqlens_q and cu_seqlens_k.
        """
        return_lse = flag("attention_over_int4_cache", "return_lse", return_lse)
        check_lse_out("attention_over_int4_cache", return_lse, lse_out)
        items = _attention_items(seqlens, options)
        return torch_host().attention_over_int4_cache(q, self._tensors(), items, return_lse, out, lse_out)

    def _tensors(self) -> tuple[Any, Any, Any, Any, Any]:
        return self.blocks, self.k_tail, self.v_tail, self.page_table, self.row_idx


def _attention_items(seqlens: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    for name in ("bias", "mask"):
        if (x := options.get(name)) is not None and len(x.shape) < 4:
            options[name] = x[(None,) * (4 - len(x.shape))]
    return pack(seqused_k=seqlens, **options)
