"""torch as a host: the operators ``heddle::*``, what of torch's tensors they refuse, and the way past the dispatcher.

Importing it says how to install torch where that is missing, so that it comes before torch in the parts of the package
that are of no use without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch as torch
    import torch.nn.attention
except ImportError as error:
    raise ImportError(
        f"this part of heddle needs torch, which cannot be imported ({error}): pip install 'torch>=2.6'"
    ) from error

if TYPE_CHECKING:
    from .activation import Activation as _Activation

__all__ = ["activate", "lists_of_block_mask"]


def __dir__() -> list[str]:
    return __all__


def activate() -> _Activation:
    """Has models that call torch's own attention run on Heddle, unchanged.

    >>> with heddle.hosts.torch.activate():
    ...     loss = model(x).sum()       # or: handle = activate(); ...; handle.deactivate()

    Heddle takes the place of torch's kernels, forward and backward, for the whole process and all threads; also under autograd,
    ``torch.compile`` and ``torch.autocast``:

      on the CPU: of those behind ``torch.nn.functional.scaled_dot_product_attention``, for calls with one head size for query,
        key and value, without dropout and without a gradient of attn_mask; and of those behind ``torch.nn.attention.varlen``,
        which torch itself does not have there.
      on NVIDIA GPUs: of flash attention, which ``scaled_dot_product_attention`` without a mask chooses in float16 and bfloat16,
        and ``torch.nn.attention.varlen`` and jagged tensors always. Also by the name "heddle" of
        ``torch.nn.attention.activate_flash_attention_impl``.

    Whatever else those kernels are asked for (dropout, float64, head sizes above 256) goes to torch's own, as before, and so do
    the calls that never get to them: where torch chooses another backend of its own, on the CPU with another head size of value
    or a mask that requires a gradient. Rows that meet no key give what torch gives. A backward may come after the end.

    Returns:
      an Activation: ``deactivate()``, or the end of a ``with``, gives torch its own kernels back, when it is the last.

    Raises:
      RuntimeError: a torch without ``torch.library.get_kernel``, whose own kernels would be out of reach.
    """
    from .activation import activate

    return activate()


def lists_of_block_mask(
    block_mask: Any,
    *,
    causal: Any = "none",
    window: Any = (-1, -1),
    cu_seqlens: torch.Tensor | None = None,
    batch: int | None = None,
    block_size: int | None = None,
    query_rows: int | None = None,
) -> dict[str, Any]:
    """FlexAttention's BlockMask as arguments of ``heddle.sparse_attention``: lists of key blocks, masks of those that are not met
    whole, and what the call applies inside them.

    >>> block_mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q // 128 - k // 128 < 4), None, None, 1024, 1024)
    >>> lists = heddle.hosts.torch.lists_of_block_mask(block_mask, causal="top_left")
    >>> out = heddle.sparse_attention(q, k, v, **lists)  # q [B, S, H, D]; FlexAttention's is [B, H, S, D]

    A call knows causality, a window and packed sequences inside the blocks that its lists name, and no mask_mod. So mask_mod is
    asked about every pair of the listed blocks. Blocks of which it says what the call says have no mask, and run on GPUs too; all
    others have one, of which equal ones are there once.

    Args:
      block_mask: a torch.nn.attention.flex_attention.BlockMask over [B or 1, H or 1, Sq, Sk].
      causal, window: as for ``attention``: what the call is to apply beside masks. FlexAttention's ``q >= k`` is "top_left". What
        is said here needs no mask.
      cu_seqlens: int32 [documents + 1], from 0 to Sq = Sk: the documents that block_mask keeps apart are packed sequences of the
        call, whose q is [Sq, H, D].
      batch: sequences of the call, where block_mask has one for all of them.
      block_size: keys of a block: 16, 32, 64 or 128. block_mask's, or the largest of these that divides it.
      query_rows: rows that share a list, at least 1. block_mask's.

    Returns:
      blocks, int32 [B, N, H or 1, n] (packed: [N, H or 1, n]), -1 behind a list's end; masks and mask_ids if a block needs one;
      block_size, query_rows, causal, window;
      and with cu_seqlens cu_seqlens_q and cu_seqlens_k. On the device of block_mask, whose values are read: it waits for a GPU.

    Raises:
      ValueError: causality, a window or packed sequences that keep from a row what block_mask lets it attend: the block, row and
        key are named; block sizes that there are no kernels for; cu_seqlens that do not go from 0 to Sq; a batch that block_mask has not.
      TypeError: what is no BlockMask, no tensor, no int.

    Source of the format: Dong et al., arXiv 2412.05496.
    """
    from .block_mask import lists_of_block_mask

    return lists_of_block_mask(block_mask, causal, window, cu_seqlens, batch, block_size, query_rows)


def _activate_for_flash_hook() -> _Activation:
    from .activation import activate_for_flash_hook

    return activate_for_flash_hook()


if hasattr(torch.nn.attention, "register_flash_attention_impl"):  # later torches
    torch.nn.attention.register_flash_attention_impl("heddle", register_fn=_activate_for_flash_hook)
