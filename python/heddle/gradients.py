"""Gradients of attention written where the caller says, beside what autograd does by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._options import flag
from .hosts import arrays, is_torch, torch_host
from .sparse import options_tuple

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._types import AnyArray, AttentionOptions


def attention_backward(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    o: AnyArray,
    lse: AnyArray,
    d_o: AnyArray,
    d_lse: AnyArray | None = None,
    *,
    dq: AnyArray | None = None,
    dk: AnyArray | None = None,
    dv: AnyArray | None = None,
    dbias: AnyArray | None = None,
    dsink: AnyArray | None = None,
    accumulate: bool = False,
    merged: bool = False,
    **options: Unpack[AttentionOptions],
) -> None:
    """Writes gradients of ``attention`` into tensors that the caller has: a step of a ring, over one piece of the keys.

    Autograd needs none of this. It is for whoever runs the pieces of a longer problem himself; docs/partial.md has a ring.

    Args:
      q, k, v, options: those of the call. dropout_seed is the forward's, an int.
      o, lse: what it gave.
      d_o, d_lse: derivatives of a loss with respect to them, of their shapes; d_lse may be None.
      dq, dk, dv, dbias, dsink: where to write; what is None is not computed. Each has its tensor's shape; dq, dk and dv have
        q's dtype or float32, dbias the bias's dtype, dsink float32.
      accumulate: those of dq, dk and dv that are float32 are added to, each element once by the call's own sum. What has 16
        bits is written, as dbias and dsink are; on the CPU dq, dk and dv must all be float32 then.
      merged: o and lse, and d_o, are those of the longer problem of which this call is a piece: dq is what the piece's keys
        add to the rows', dk and dv what its rows add to the keys'. The sink is the one that the merge had.

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule. Nothing has been written. Also options that
        have no meaning in a backward (out, lse_out, paged keys), and a tensor that requires a gradient unless torch's
        gradients are off.
      TypeError: as ``attention``.
    """
    for name in ("out", "lse_out"):
        if options.get(name) is not None:
            raise ValueError(
                f"[attention_backward] {name} is given: a backward writes gradients, into dq, dk and so on"
            )
        options.pop(name, None)  # type: ignore[misc]
    items = options_tuple(q, dict(options))
    flags = flag("attention_backward", "accumulate", accumulate), flag("attention_backward", "merged", merged)
    host = torch_host() if is_torch(q) else arrays
    host.attention_backward(q, k, v, o, lse, d_o, d_lse, (dq, dk, dv, dbias, dsink), items, *flags)
