"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for Heddle's operators, by torch's rules for its own: two for each
multiplication of a matrix product, causality and windows not taken off, five products in the backward of attention.

torch's module takes a while to import (it imports Triton, where there is one), so it is handed the formulas when it is there; and
a counter knows those alone that were there when it was made, so that is at once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

Arguments = dict[str, Any]


def _known(x: torch.Tensor) -> bool:
    """Whether values can be read, which those of a traced tensor cannot."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return not isinstance(x, (FakeTensor, FunctionalTensor)) and x.device.type != "meta"


def _lengths(cu_seqlens: torch.Tensor | None, used: torch.Tensor | None, longest: int, sequences: int) -> list[int]:
    """Of each sequence; as long as the longest, where nobody knows."""
    if used is not None and _known(used):
        return used.tolist()
    if cu_seqlens is not None and _known(cu_seqlens):
        return cu_seqlens.diff().tolist()
    return [longest] * sequences


def _scores(a: Arguments) -> int:
    """Pairs of a row and a key, in all heads."""
    q = a["q"]
    k = next(a[name] for name in ("k", "k_cache") if name in a)
    packed, table = a["cu_seqlens_q"], a.get("page_table")
    sequences = q.shape[0] if packed is None else packed.shape[0] - 1
    rows = _lengths(packed, None, q.shape[1] if packed is None else a["max_seqlen_q"] or q.shape[0], sequences)
    if table is not None:
        longest = table.shape[1] * k.shape[1]
    elif a["cu_seqlens_k"] is not None:
        longest = a["max_seqlen_k"] or k.shape[0]
    else:
        longest = k.shape[1]
    used, added = a["seqused_k"], 0
    if "k_new" in a:  # seqused_k is what there was before
        added = a["k_new"].shape[1] if used is not None and _known(used) else 0
    keys = _lengths(a["cu_seqlens_k"], used, longest, sequences)
    return q.shape[-2] * sum(r * (n + added) for r, n in zip(rows, keys))


def _listed_scores(a: Arguments) -> int:
    """Of attention over lists: whole blocks, for all rows and heads that share a list."""
    blocks, counts, offsets = a["blocks"], a["counts"], a["offsets"]
    units = blocks.shape[-2] if offsets is None else offsets.shape[-2]
    entries = blocks.numel()
    if offsets is not None:
        if _known(offsets):
            entries = int(offsets.diff().clamp(min=0).sum())
    elif _known(blocks):
        named = blocks >= 0
        if counts is not None:
            named = named & (torch.arange(blocks.shape[-1], device=blocks.device) < counts[..., None])
        entries = int(named.sum())
    return entries * a["block_size"] * a["query_rows"] * (a["q"].shape[-2] // units)


def _forward(scores: Callable[[Arguments], int]) -> Callable[[Arguments], int]:
    def count(a: Arguments) -> int:
        v = next(a[name] for name in ("v", "v_cache") if name in a)
        return 2 * scores(a) * (a["q"].shape[-1] + v.shape[-1])

    return count


def _backward(scores: Callable[[Arguments], int]) -> Callable[[Arguments], int]:
    def count(a: Arguments) -> int:
        return 2 * scores(a) * (3 * a["q"].shape[-1] + 2 * a["v"].shape[-1])

    return count


def _linear(a: Arguments) -> int:
    return 2 * a["x"].numel() * a["rows"]


def _linear_backward(a: Arguments) -> int:
    """The gradient of x alone is a product: weights have none."""
    if not a["wanted"][0]:
        return 0
    dy = a["dy"]
    return 2 * (dy.numel() // max(dy.shape[-1], 1)) * a["rows"] * a["columns"]


_FORMULAS: dict[str, Callable[[Arguments], int]] = {
    "attention_forward": _forward(_scores),
    "attention_forward_out": _forward(_scores),
    "attention_backward": _backward(_scores),
    "attention_backward_out": _backward(_scores),
    "attention_with_kv_cache": _forward(_scores),
    "attention_with_kv_cache_out": _forward(_scores),
    "sparse_attention": _forward(_listed_scores),
    "sparse_attention_out": _forward(_listed_scores),
    "sparse_attention_backward": _backward(_listed_scores),
    # As if nothing were replaced: what is, follows from the data.
    "adaptive_attention": _forward(_scores),
    "adaptive_attention_backward": _backward(_scores),
    "linear_forward": _linear,
    "linear_forward_out": _linear,
    "linear_backward": _linear_backward,
}


def _counted(name: str) -> tuple[Any, Callable[..., int]]:
    """The operator, and its formula of positional arguments."""
    packet = getattr(torch.ops.heddle, name)
    names = [argument.name for argument in packet.default._schema.arguments]
    formula = _FORMULAS[name]

    def count(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        return formula(dict.fromkeys(names) | dict(zip(names, arguments)) | named)

    return packet, count


def register(counter: ModuleType) -> None:
    """Hands torch's module the formulas."""
    for name in _FORMULAS:
        packet, count = _counted(name)
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet, get_raw=True)(count)
