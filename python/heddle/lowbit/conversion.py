"""Checkpoints quantised. heddle.lowbit is their public name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _heddle
from .._files import existing
from .tensor import plain

if TYPE_CHECKING:
    from .._types import AnyArray, FormatName, RuleName, Rules


@dataclass(frozen=True)
class LayerReport:
    """A layer that ``quantize_checkpoint`` changed.

    Attributes:
      name: its tensors' names begin with it. file: that they are in.
      format: see ``FORMATS``; "bfloat16" where float32 was rounded. rule: of its scales, "" for bfloat16.
      shape: (N, K).
      sqnr: in dB; mean, max: of the absolute error; max_at: (row, column).
      bytes_before, bytes_after: in the files, with all that belongs to the layer.
      global_scale: of nvfp4, shared by layers whose products run as one; else 0.
    """

    name: str
    file: str
    format: str
    rule: str
    shape: tuple[int, int]
    sqnr: float
    mean: float
    max: float
    max_at: tuple[int, int]
    bytes_before: int
    bytes_after: int
    global_scale: float


@dataclass(frozen=True)
class QuantizeReport:
    """What ``quantize_checkpoint`` did: layers by name, names of 2-D weights that stayed, 3-D tensors (experts of a mixture
    in one), which are copied, as (name, file, shape, bytes), files written, bytes of all tensors, and what config.json says
    of it."""

    layers: dict[str, LayerReport]
    kept: list[str]
    copied_3d: list[tuple[str, str, tuple[int, ...], int]]
    files: list[str]
    bytes_before: int
    bytes_after: int
    quantization_config: dict[str, Any]


def linear_layer(name: str) -> bool:
    """Whether ``quantize_checkpoint`` takes a 2-D weight of this name (less ".weight") for a linear layer of a Transformer:
    it lies in a numbered layer and is no embedding, norm, convolution, router or position table."""
    return _heddle.lowbit_linear_layer(name)


def quantize_checkpoint(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: FormatName = "nvfp4",
    rule: RuleName = "mse",
    layers: Rules = (),
    keep: str | Iterable[str] = (),
    importance: Mapping[str, AnyArray | Sequence[float]] | None = None,
    progress: Callable[[str, str, int, int, int, int], None] | None = None,
) -> QuantizeReport:
    """Quantises the linear layers of a checkpoint into a new folder that Hugging Face's tools load and ``load`` reads back to
    the bit. docs/quantize.md says which layout each format has.

    Args:
      input: a safetensors file, or a folder of them with or without an index. One tensor at a time is in memory.
      output: the folder to make. Whole or not at all: it gets its name when everything is written.
      format: of layers that no pattern names and ``linear_layer`` is true for. rule: of scales, see ``quantize``.
      layers: {pattern: format}, the first that matches a layer's name decides; "*" stands for any characters, "?" for
        one, "[0-3]" for one of those. A format may bring its rule, "int4_g64:plain", or be "16bit" (float32 becomes
        bfloat16) or "keep".
      keep: patterns of layers that stay as they are, looked at before `layers`.
      importance: float32 [K] by layer, see ``quantize``; layers that it lacks have none. Each name must be that of a
        2-D weight, less ".weight"; layers that stay as they are may be among them.
      progress: called before each tensor and at the end with (tensor, format, bytes_done, bytes_total, layers_done,
        layers_total). What it raises ends the work.

    Raises:
      ValueError: a bad argument, a layer that cannot be quantised (K no multiple of the group, NaN, infinity), a file that is
        no safetensors file, a name that no layer has; the message names file and tensor. FileNotFoundError: input is
        not there; names of a hub are not downloaded. RuntimeError: a file cannot be read or written. Nothing is left
        written then.
    """
    rules = [(pattern, "keep") for pattern in ([keep] if isinstance(keep, str) else keep)]
    pairs: Any = layers.items() if isinstance(layers, Mapping) else layers
    rules += list(pairs)

    def of_layer(name: str) -> Any:
        found = (importance or {}).get(name)
        return None if found is None else plain(found) if hasattr(found, "dtype") else np.asarray(found, np.float32)

    changed, kept, copied, files, before, after, config = _heddle.quantize_checkpoint(
        existing("quantize_checkpoint", "input", input),
        os.fspath(output),
        format,
        rule,
        rules,
        None if importance is None else of_layer,
        list(importance or ()),
        progress,
    )
    reports = {parts[0]: LayerReport(*parts) for parts in changed}
    return QuantizeReport(reports, kept, copied, files, before, after, json.loads(config))
