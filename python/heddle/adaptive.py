"""Attention with a tolerance in and a proved bound out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .hosts import arrays, is_torch, torch_host
from .sparse import options_tuple

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._types import Array, OnExceedName, QuestionOptions


def adaptive_attention(
    q: Array,
    k: Array,
    v: Array,
    tol: float = 1e-2,
    on_exceed: OnExceedName = "refine",
    **options: Unpack[QuestionOptions],
) -> tuple[Array, Array, Array]:
    """Attention that leaves out what counts little, up to a tolerance, and says how far each row may be off.

    Scores, softmax and lse are those of ``attention``, of every pair. For blocks of 32 keys that have little of a row's mass,
    or whose keys share it evenly, the product with v is replaced by the block's mass times the mean of its values. Then, for
    each row of each head,

        norm(out - exact) <= bound * largest      bound <= tol

    beside the rounding that ``attention`` has. The norm is Euclidean, largest is the largest norm of a value of the sequence
    and kv head, and exact is what ``attention`` would give. Proof: docs/numerics.md. The more is replaced, the faster the call;
    where nothing can be, it costs what ``attention`` costs.

    A block is replaced for up to 48 neighbouring rows at once, if each of them allows it and meets all of it. So within its
    bound a row depends on its neighbours, later ones too, and tol's unit on all values of the sequence.

    B sequences, H query heads, Hkv key/value heads, Sq and Sk lengths, as for ``attention``; float32, float16 or bfloat16, on
    the CPU. Torch tensors go through a torch operator with gradients of q, k, v and sink, of what was computed: also through
    lse; bound has none. Other arrays are forward only.

    Args:
      q, k, v: as for ``attention``: [B, Sq, H, D], [B, Sk, Hkv, D], [B, Sk, Hkv, Dv]; packed, or k and v in pages.
      tol: most that bound may be, above 0. An error of bfloat16's rounding is about 4e-3.
      on_exceed: what to do with a row whose bound comes out above tol: "refine" it, compute the call as "dense" attention, or
        "report" it. Blocks are replaced only while every bound stays within tol, so that none comes out above it, and the
        three give the same.
      options: those of ``attention``, except bias, mask, draft_mask, dropout_p, precision and method. Gradients with
        alibi_slopes or softcap are served by ``force="reference"`` alone, and refused with page_table, cache_batch_idx or
        cache_leftpad.

    Returns:
      out [B, Sq, H, Dv] (packed: [total_q, H, Dv]), of q's dtype (or out_dtype) and kind of array; lse and bound, float32
      [B, H, Sq] (packed: [H, total_q]). A row without any key gives out 0, lse -inf (with a sink, lse = sink) and bound 0; one
      with scores that are no numbers has a bound that is none.

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule. Nothing has been written.
      TypeError: as ``attention``.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.
    """
    items = options_tuple(q, dict(options))
    if is_torch(q):
        return torch_host().adaptive_attention(q, k, v, tol, on_exceed, items)
    return arrays.adaptive_attention(q, k, v, tol, on_exceed, items)
