"""torch as a host: the operators ``heddle::*``, what of torch's tensors they refuse, and the way past the dispatcher.

Importing it says how to install torch where that is missing, so that it comes before torch in the parts of the package
that are of no use without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this part of heddle needs torch, which cannot be imported ({error}): pip install 'heddle[torch]'"
    ) from error

if TYPE_CHECKING:
    from .activation import Activation as _Activation

__all__ = ["activate"]


def __dir__() -> list[str]:
    return __all__


def activate() -> _Activation:
    """Has models that call ``torch.nn.functional.scaled_dot_product_attention`` run on Heddle, unchanged, on the CPU.

    >>> with heddle.hosts.torch.activate():
    ...     loss = model(x).sum()       # or: handle = activate(); ...; handle.deactivate()

    It takes the place of the kernels that torch runs for calls with one head size for query, key and value, without dropout and
    without a gradient of attn_mask, and of their backward, for the whole process and all threads; also under autograd,
    ``torch.compile`` and ``torch.autocast``. Whatever else those kernels take (float64, head sizes above 256) goes to torch's
    own kernel, as before, and so do the calls that never get to them: with dropout, with another head size of value, with a
    mask that requires a gradient. Results of rows that meet no key are 0, as torch's. A backward may come after the end.

    On a GPU nothing changes: torch's hook there (``torch.nn.attention.register_flash_attention_impl``) is not used. heddle.sdpa
    serves both.

    Returns:
      an Activation: ``deactivate()``, or the end of a ``with``, gives torch its own kernels back, when it is the last.

    Raises:
      RuntimeError: a torch without ``torch.library.get_kernel``, whose own kernels would be out of reach.
    """
    from .activation import activate

    return activate()
