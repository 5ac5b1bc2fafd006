"""torch as a host: the operators ``heddle::*``, what of torch's tensors they refuse, and the way past the dispatcher.

Importing it says how to install torch where that is missing, so that it comes before torch in the parts of the package
that are of no use without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import torch
    import torch.nn.attention
except ImportError as error:
    raise ImportError(
        f"this part of heddle needs torch, which cannot be imported ({error}): pip install 'heddle[torch]'"
    ) from error

if TYPE_CHECKING:
    from .activation import Activation as _Activation

__all__ = ["activate"]


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


def _activate_for_flash_hook() -> _Activation:
    from .activation import activate_for_flash_hook

    return activate_for_flash_hook()


if hasattr(torch.nn.attention, "register_flash_attention_impl"):  # later torches
    torch.nn.attention.register_flash_attention_impl("heddle", register_fn=_activate_for_flash_hook)
