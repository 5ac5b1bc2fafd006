"""transformers as a host: models of the library ``transformers`` on Heddle's kernels, unchanged (docs/hosts.md).

>>> import heddle.hosts.transformers
>>> heddle.hosts.transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="heddle")

and with their linear layers in 4 and 8 bits; importing this module makes both known to ``from_pretrained``:

>>> config = heddle.hosts.transformers.HeddleConfig("nvfp4")
>>> model = AutoModelForCausalLM.from_pretrained(..., quantization_config=config)
>>> model.save_pretrained("small")
>>> model = AutoModelForCausalLM.from_pretrained("small")
>>> model = heddle.hosts.transformers.load_quantized("Llama-3.2-1B-nvfp4")  # what `heddle quantize` wrote
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import AttentionInterface as _AttentionInterface
    from transformers import AttentionMaskInterface as _AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask as _sdpa_mask

    from .attention import attention as _attention
    from .masks import mask as _mask
except ImportError as error:
    raise ImportError(
        f"heddle.hosts.transformers needs transformers 5.22 or later, which cannot be imported ({error}): "
        "pip install 'transformers>=5.22'"
    ) from error

from .kernel_folder import write_kernel_folder
from .quantization_config import HeddleConfig
from .quantizer import HeddleQuantizer, quantize_model
from .stored import load_quantized

__all__ = ["HeddleConfig", "HeddleQuantizer", "load_quantized", "quantize_model", "register", "write_kernel_folder"]


def __dir__() -> list[str]:
    return __all__


_MASKS: dict[str, Any] = {"limits": _mask, "boolean": _sdpa_mask}


def register(name: str = "heddle", masks: str = "limits") -> None:
    """Makes ``attn_implementation=name`` mean Heddle, in ``from_pretrained``, ``from_config`` and
    ``set_attn_implementation``; again with the same name replaces what it meant.

    Args:
      name: not with "flash" in it, which transformers looks for on the Hub; not one of transformers' own.
      masks: "limits" has masks made only where a few lengths do not say the same; "boolean" always writes them out, for a
        model that changes masks on their way to its layers.

    Raises:
      ValueError: a bad name or kind of mask. TypeError: a name that is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"[register] name is {name!r}: it must be a string")
    if masks not in _MASKS:
        raise ValueError(f"[register] masks is {masks!r}: it must be 'limits' or 'boolean'")
    known = _AttentionInterface._global_mapping.get(name)
    if not name or "flash" in name or "/" in name or name == "eager" or (known is not None and known is not _attention):
        raise ValueError(
            f"[register] name is {name!r}: it must not be empty or one of transformers' own, nor have 'flash' or '/' in it, which "
            "mean a kernel of the Hub"
        )
    _AttentionInterface.register(name, _attention)
    _AttentionMaskInterface.register(name, _MASKS[masks])
