"""Heddle in the place of torch's own kernels of attention. heddle.hosts.torch.activate is the public name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from ... import _heddle
from ..._options import pack
from .flash_operators import FLASH, PACKED, NotServed, check
from .functional import four
from .operators import native

_lock = threading.Lock()
_active: list[Activation] = []
_libraries: dict[str, torch.library.Library] = {}  # by device


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, mask: torch.Tensor | None) -> None:
    check(q, k, v, dropout_p)
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        raise NotServed("an operand has no elements")
    if mask is not None and mask.dtype not in (torch.float32, q.dtype):
        raise NotServed(f"attn_mask is {mask.dtype}")


def _like_torchs(x: torch.Tensor) -> torch.Tensor:
    """Memory for a gradient of x [B, H, S, D], in the order that torch's operator says it has: as [B, S, H, D]."""
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype)


def _forward(
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
    _check(q, k, v, dropout_p, attn_mask)
    out = torch.empty_like(q)
    batch, heads, rows, _ = q.shape
    lse = torch.empty((batch, rows, heads), dtype=torch.float32, device=q.device).transpose(1, 2)
    items = pack(bias=four(attn_mask), causal="top_left" if is_causal else "none", scale=scale)
    native(_heddle.attention_forward, q, k, v, out, lse, items, True)
    if attn_mask is not None:  # torch's own has 0 for rows that meet no key, which its backward may get to see
        lse.masked_fill_(lse == -torch.inf, 0.0)
    return out, lse


def _backward(
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
    _check(q, k, v, dropout_p, attn_mask)
    dq, dk, dv = (_like_torchs(x) for x in (q, k, v))
    items = pack(bias=four(attn_mask), causal="top_left" if is_causal else "none", scale=scale)
    native(_heddle.attention_backward, q, k, v, out, lse, d_o, None, dq, dk, dv, None, None, items, True, False, False)
    return dq, dk, dv


#: By device: what stands in for which operator of torch's.
_OURS: dict[str, dict[str, Callable[..., Any]]] = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": _forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _backward,
        **{name: FLASH[name] for name in PACKED},
    },
    "CUDA": FLASH,
}


def _torch_has(name: str, device: str) -> bool:
    """Whether torch has a kernel of its own: not for packed sequences on the CPU, nor on GPUs that it was not built for."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device)


def _standing_in(name: str, device: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel that serves what it can and hands torch's own the rest."""
    own = torch.library.get_kernel(f"aten::{name}", device) if _torch_has(name, device) else None

    def instead(keys: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return ours(*arguments, **named)
        except NotServed as reason:
            if own is None:
                said = reason.__cause__ or NotImplementedError(
                    f"[{name}] {reason}: Heddle does not serve that, and torch has no kernel of its own on {device}"
                )
                raise said from None
        return own.call_boxed(keys, *arguments, **named)

    return instead


def install(device: str) -> torch.library.Library:
    """Puts Heddle's functions in the place of torch's kernels on "CPU" or "CUDA", until the library is destroyed."""
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(
            f"[activate] torch {torch.__version__} has no torch.library.get_kernel, by which its own kernels stay within reach: a "
            "later torch is needed"
        )
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for name, ours in _OURS[device].items():
            if hasattr(torch.ops.aten, name):  # earlier torches have not all of them
                library.impl(name, _standing_in(name, device, ours), device, with_keyset=True)
    return library


def serves_gpus() -> bool:
    """Whether both torch and Heddle have kernels of flash attention on GPUs."""
    built = _heddle.cuda_built() and torch.version.cuda is not None
    return built and _torch_has("_scaled_dot_product_flash_attention", "CUDA")


class Activation:
    """What activate() returns: ``deactivate()`` ends it, and so does leaving a ``with``."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices

    def deactivate(self) -> None:
        """Gives torch its own kernels back, unless another activation is not yet ended. Again: nothing."""
        with _lock:
            if self in _active:
                _active.remove(self)
            for device in self._devices:
                if device in _libraries and not any(device in other._devices for other in _active):
                    _libraries.pop(device)._destroy()

    remove = deactivate  # as the handles of torch.nn.attention.activate_flash_attention_impl call it

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deactivate()


def activate(devices: Sequence[str] | None = None) -> Activation:
    """See heddle.hosts.torch.activate. devices: "CPU", "CUDA"; None: all that there are kernels for."""
    if devices is None:
        devices = ("CPU", "CUDA") if serves_gpus() else ("CPU",)
    with _lock:
        for device in devices:
            if device not in _libraries:
                _libraries[device] = install(device)
        _active.append(handle := Activation(devices))
    return handle


def activate_for_flash_hook() -> Activation:
    """What ``torch.nn.attention.activate_flash_attention_impl("heddle")`` calls."""
    if not serves_gpus():
        which = "this build of Heddle" if torch.version.cuda is not None else f"torch {torch.__version__}"
        raise RuntimeError(
            f"[activate] {which} has no GPU kernels, which torch's flash hook is for: heddle.hosts.torch.activate() serves the CPU"
        )
    return activate(("CUDA",))
