"""transformers' attention function, on ``heddle.attention``."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from transformers.utils.import_utils import is_tracing

from ... import functional
from .limits import Limits, is_limits, read_limits
from .masks import documents_of, restarts

_NAME = "[heddle attention]"
# What changes the result, and there is nothing here to do it with. transformers' sdpa ignores such arguments.
_REFUSED = {
    "indices": "keys chosen for each row",
    "block_indices": "blocks of keys chosen for each row",
    "head_mask": "factors of the heads' probabilities",
    "learnable_sink": "sinks under another name than s_aux",
    "sinks": "sinks under another name than s_aux",
    "block_table": "pages of a cache; continuous batching takes the folder of heddle.hosts.transformers.write_kernel_folder",
}


def _refuse(module: torch.nn.Module, output_attentions: bool | None, others: dict[str, Any]) -> None:
    if output_attentions is None:
        output_attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    if output_attentions:
        raise NotImplementedError(
            f"{_NAME} output_attentions is True: the matrix of probabilities is never made; load the model with "
            "attn_implementation='eager' to see it"
        )
    for name, meaning in _REFUSED.items():
        if others.get(name) is not None:
            raise NotImplementedError(f"{_NAME} {type(module).__name__} gives {name}, {meaning}: that is not served")


def _check_mask(mask: torch.Tensor, dtype: torch.dtype) -> None:
    if mask.dim() != 4:
        raise ValueError(
            f"{_NAME} attention_mask is {list(mask.shape)}: it must have four dimensions, broadcastable to [B, H, Sq, Sk]"
        )
    if mask.dtype not in (torch.bool, torch.float32, dtype):
        raise ValueError(
            f"{_NAME} attention_mask is {mask.dtype}: it must be torch.bool (True = attend), torch.float32 or the query's "
            f"dtype, {dtype}, added to the scores"
        )


# The positions that were asked last, of how many sequences, and what was found: all layers of a model bring the same.
_asked: tuple[weakref.ref[torch.Tensor], int, int, torch.Tensor | None] | None = None


def _documents_of(position_ids: torch.Tensor, batch: int) -> torch.Tensor | None:
    """documents_of positions [batch or 1, S], which on a GPU waits for the answer, once for all layers."""
    global _asked
    counted = not position_ids.is_inference()  # whether changes of it are
    last = _asked
    if counted and last is not None and last[0]() is position_ids and last[1:3] == (position_ids._version, batch):
        return last[3]
    found = documents_of(position_ids.expand(batch, -1))
    if counted:
        _asked = (weakref.ref(position_ids), position_ids._version, batch, found)
    return found


def _part(limits: Limits, position_ids: torch.Tensor, batch: int) -> tuple[Limits, torch.Tensor | None]:
    """Limits of causal rows that are their own keys, parted where position_ids [B or 1, S] start again. A mask,
    bool [B or 1, 1, S, S], says all while a graph is traced, where the number of documents is not known.

    A mask function is not told of positions in a call that has a cache, where documents would then see one another.
    """
    if not is_tracing(position_ids):
        documents = _documents_of(position_ids, batch)
        return limits if documents is None else replace(limits, documents=documents), None
    rows = position_ids.shape[1]
    document = torch.nn.functional.pad(restarts(position_ids).cumsum(-1), (1, 0))
    apart = document[:, None, :, None] == document[:, None, None, :]
    return Limits(False), apart & limits.mask(1, rows, rows, position_ids.device)


def _differentiates(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    output_attentions: bool | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' AttentionInterface calls it.

    Args:
      module: the layer; its ``is_causal`` (True if it has none) where the argument is None.
      query: [B, H, Sq, D]; key: [B, Hkv, Sk, D], value: [B, Hkv, Sk, Dv], H a multiple of Hkv.
      attention_mask: what ``masks.mask`` made; or bool (True = attend), float32 or query's dtype (added to the scores),
        [B, H or 1, Sq, Sk]. None: every key, or, if causal and Sq > 1, row i meets keys j <= i, also where Sk > Sq.
      scaling: of the scores; 1 / sqrt(D) if None. softcap, dropout: as of ``heddle.attention``.
      s_aux: [H], sinks. position_bias: [B or 1, H, Sq, Sk], added to the scores.
      position_ids: [B or 1, Sq]; where causal rows are their own keys and positions start again (0, or less than before), a
        document begins.
      cu_seq_lens_q, cu_seq_lens_k: int [n + 1], where sequences begin in rows and in keys laid end to end.
      others: what else layers say (their window, which the mask has; lengths' maxima).

    Returns:
      ([B, Sq, H, Dv], None).

    Raises:
      NotImplementedError: output_attentions, or an argument that changes the result and has no kernel. ValueError: a bad mask,
      or what ``heddle.attention`` refuses.
    """
    _refuse(module, output_attentions, others)
    rows = query.shape[2]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    bias, mask = position_bias, None
    if cu_seq_lens_q is not None and bias is not None:
        raise NotImplementedError(
            f"{_NAME} {type(module).__name__} gives position_bias beside cu_seq_lens_q: that is not served"
        )
    if attention_mask is not None and not is_limits(attention_mask):
        _check_mask(attention_mask, query.dtype)
        limits, mask = Limits(False), attention_mask
    elif attention_mask is not None:
        limits = read_limits(attention_mask)
    else:
        limits = Limits(is_causal and rows > 1)
        if limits.causal and cu_seq_lens_q is None:
            if key.shape[2] > rows:  # slots of a static cache that are still empty
                key, value = key[:, :, :rows], value[:, :, :rows]
                bias = bias if bias is None else bias[..., :rows]
            elif key.shape[2] < rows:  # Limits count from the end
                mask = torch.ones((1, 1, rows, key.shape[2]), dtype=torch.bool, device=query.device).tril()
                limits = Limits(False)
    keys, starts_k = key.shape[2], None
    if mask is None and limits.of_all_keys():
        if cu_seq_lens_q is not None:
            limits = replace(limits, documents=cu_seq_lens_q.to(torch.int32))
            starts_k = cu_seq_lens_k if cu_seq_lens_k is None else cu_seq_lens_k.to(torch.int32)
        elif limits.causal and rows == keys and position_ids is not None and tuple(position_ids.shape[1:]) == (rows,):
            limits, mask = _part(limits, position_ids, query.shape[0])
    # Keys skipped in front have no gradients, and would shift a bias.
    if (limits.leftpad is not None and (bias is not None or _differentiates(query, key, value))) or (
        limits.documents is not None and bias is not None
    ):
        limits, mask = Limits(False), limits.mask(query.shape[0], rows, keys, query.device)
    if mask is not None and mask.dtype is not torch.bool:
        bias, mask = mask if bias is None else bias + mask, None
    out = _attend(
        query,
        key,
        value,
        limits,
        starts_k,
        scale=scaling,
        softcap=softcap or 0.0,
        bias=bias,
        mask=mask,
        sink=None if s_aux is None else s_aux.float(),
        dropout_p=dropout,
        deterministic=deterministic or None,
    )
    return out.contiguous(), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    limits: Limits,
    starts_k: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """[B, Sq, H, Dv] of operands [B, H, S, D]. starts_k: where the documents' keys begin, if not where their rows do."""
    batch = max(query.shape[0], key.shape[0])
    q, k, v = (x.transpose(1, 2).expand(batch, -1, -1, -1) for x in (query, key, value))
    options.update(causal="bottom_right" if limits.causal else "none", window=limits.sides())
    if limits.documents is None:
        return functional.attention(
            q, k, v, cache_leftpad=limits.leftpad, seqused_k=limits.used_k, seqused_q=limits.used_q, **options
        )
    out = functional.attention(
        *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
        cu_seqlens_q=limits.documents,
        cu_seqlens_k=limits.documents if starts_k is None else starts_k,
        # Bounds: with a batch, none is longer than its rows; lengths' own maxima may be tensors.
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        **options,
    )
    return out.unflatten(0, q.shape[:2])
