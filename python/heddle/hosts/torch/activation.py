"""Heddle in the place of torch's own kernel behind ``scaled_dot_product_attention`` on the CPU. heddle.hosts.torch.activate is
the public name."""

from __future__ import annotations

import threading
import warnings
from types import TracebackType
from typing import Any

import torch

from ... import _heddle
from ..._options import pack
from .functional import four
from .operators import native

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = f"{_FORWARD}_backward"
_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_MAX_HEAD_SIZE = 256

_lock = threading.Lock()
_active: list[Activation] = []
_library: torch.library.Library | None = None


def _serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, mask: torch.Tensor | None) -> bool:
    """Whether there are kernels for this call of torch's operator."""
    return (
        q.dtype in _DTYPES
        and q.dtype is k.dtype is v.dtype
        and q.numel() > 0
        and k.numel() > 0
        and v.numel() > 0
        and max(q.shape[-1], v.shape[-1]) <= _MAX_HEAD_SIZE
        and q.shape[-1] == v.shape[-1]
        and dropout_p == 0.0
        and (mask is None or mask.dtype in (torch.float32, q.dtype))
    )


def _like_torchs(x: torch.Tensor) -> torch.Tensor:
    """Memory for a gradient of x [B, H, S, D], in the order that torch's operator says it has: as [B, S, H, D]."""
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype)


def _forward(
    own: Any,
    keys: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's operator: q [B, H, S, D], k and v [B, Hkv, Sk, D], attn_mask added to the scores -> (out, lse [B, H, S])."""
    if not _serves(q, k, v, dropout_p, attn_mask):
        return own.call_boxed(keys, q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    out = torch.empty_like(q)
    batch, heads, rows, _ = q.shape
    lse = torch.empty((batch, rows, heads), dtype=torch.float32).transpose(1, 2)
    items = pack(bias=four(attn_mask), causal="top_left" if is_causal else "none", scale=scale)
    native(_heddle.attention_forward, q, k, v, out, lse, items, True)
    if attn_mask is not None:  # torch's own has 0 for rows that meet no key, which its backward may get to see
        lse.masked_fill_(lse == -torch.inf, 0.0)
    return out, lse


def _backward(
    own: Any,
    keys: Any,
    d_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not _serves(q, k, v, dropout_p, attn_mask):
        return own.call_boxed(keys, d_o, q, k, v, out, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    dq, dk, dv = (_like_torchs(x) for x in (q, k, v))
    items = pack(bias=four(attn_mask), causal="top_left" if is_causal else "none", scale=scale)
    native(_heddle.attention_backward, q, k, v, out, lse, d_o, None, dq, dk, dv, None, None, items, True, False, False)
    return dq, dk, dv


def _install() -> torch.library.Library:
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(
            f"[activate] torch {torch.__version__} has no torch.library.get_kernel, by which its own kernels stay within reach: a "
            "later torch is needed"
        )
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for name, ours in ((_FORWARD, _forward), (_BACKWARD, _backward)):
            own = torch.library.get_kernel(f"aten::{name}", "CPU")

            def instead(keys: Any, *arguments: Any, own: Any = own, ours: Any = ours, **named: Any) -> Any:
                return ours(own, keys, *arguments, **named)

            library.impl(name, instead, "CPU", with_keyset=True)
    return library


class Activation:
    """What activate() returns: ``deactivate()`` ends it, and so does leaving a ``with``."""

    def deactivate(self) -> None:
        """Gives torch its own kernels back, unless another activation is not yet ended. Again: nothing."""
        global _library
        with _lock:
            if self in _active:
                _active.remove(self)
            if not _active and _library is not None:
                _library._destroy()
                _library = None

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deactivate()


def activate() -> Activation:
    """See heddle.hosts.torch.activate."""
    global _library
    with _lock:
        if _library is None:
            _library = _install()
        _active.append(handle := Activation())
    return handle
