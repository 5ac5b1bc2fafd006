"""Low-bit layers of checkpoints. heddle.lowbit is their public name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np

from .. import _heddle
from .._files import existing
from .tensor import QuantizedTensor, empty

if TYPE_CHECKING:
    import torch

    from .._types import FormatName, FrameworkName

#: A file or folder, or several.
Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """A low-bit layer of a checkpoint, as ``layers`` and ``layout_of`` find it.

    Attributes:
      name: what its tensors' names begin with.
      layout: who wrote it and how: "gpt_oss_mxfp4", "modelopt_nvfp4", "compressed_tensors_nvfp4",
        "compressed_tensors_mxfp4", "compressed_tensors_int4", "compressed_tensors_int8", "compressed_tensors_fp8",
        "bitsandbytes", "gptq" or "awq"; None if it is refused.
      reason: what the layout was told by.
      format: the format that it loads into, see ``FORMATS``; None if it is refused.
      shape: (N, K), of one expert's matrix where there are several.
      experts: how many matrices it holds; 0: it is one.
      gate_up_interleaved: row 2i is row i of the gate, row 2i + 1 that of the up projection.
      column_order: int32 [K] where columns that share a scale do not lie together (g_idx of "act-order"), else None. It
        loads with ``reorder_columns=True`` as weights[:, column_order], so that y = x[:, column_order] @ loaded.T.
      refusal: why it cannot be loaded, or "".
    """

    name: str
    layout: str | None
    reason: str
    format: FormatName | None
    shape: tuple[int, int]
    experts: int
    gate_up_interleaved: bool
    column_order: np.ndarray[Any, np.dtype[np.int32]] | None
    refusal: str


def _open(paths: Any, gptq_version: int | None) -> _heddle.Checkpoint:
    one = isinstance(paths, (str, os.PathLike))
    found = [existing("checkpoint", "paths", path) for path in ([paths] if one else paths)]
    return _heddle.Checkpoint.open(found, gptq_version or 0)


def _stored(parts: tuple[Any, ...]) -> StoredLayer:
    name, layout, reason, format, rows, columns, experts, interleaved, order, refusal = parts
    column_order = np.frombuffer(order, np.int32) if order else None
    return StoredLayer(name, layout, reason, format, (rows, columns), experts, interleaved, column_order, refusal)


def layers(paths: Paths, *, gptq_version: int | None = None) -> dict[str, StoredLayer]:
    """The low-bit layers of a checkpoint by name, those that cannot be loaded too: see their ``refusal``.

    Args:
      paths: a safetensors file, or a folder for all of its *.safetensors, or several of them. Nothing is read but headers,
        small tensors and g_idx.
      gptq_version: 1 if zero points of GPTQ are stored less 1, 2 if as they are. None: as config.json or
        quantize_config.json beside the files says; without those, layers of GPTQ are refused.

    Raises:
      ValueError: a file that is no safetensors file, or a tensor in two files. FileNotFoundError: a path that is not
        there; names of a hub are not downloaded. RuntimeError: a file that cannot be read.
    """
    return {parts[0]: _stored(parts) for parts in _open(paths, gptq_version).layers()}


def layout_of(paths: Paths, name: str, *, gptq_version: int | None = None) -> StoredLayer:
    """One layer of ``layers``, for example "model.layers.0.mlp.down_proj"; ValueError if it is not there or is refused."""
    return _stored(_open(paths, gptq_version).layer(name))


@overload
def load(
    paths: Paths,
    name: str,
    *,
    expert: int | None = None,
    gptq_version: int | None = None,
    reorder_columns: bool = False,
    framework: Literal["numpy"] = "numpy",
) -> QuantizedTensor[np.ndarray]: ...
@overload
def load(
    paths: Paths,
    name: str,
    *,
    expert: int | None = None,
    gptq_version: int | None = None,
    reorder_columns: bool = False,
    framework: Literal["torch"],
) -> QuantizedTensor[torch.Tensor]: ...
@overload
def load(
    paths: Paths,
    name: str,
    *,
    expert: int | None = None,
    gptq_version: int | None = None,
    reorder_columns: bool = False,
    framework: FrameworkName,
) -> QuantizedTensor[Any]: ...
def load(
    paths: Paths,
    name: str,
    *,
    expert: int | None = None,
    gptq_version: int | None = None,
    reorder_columns: bool = False,
    framework: FrameworkName = "numpy",
) -> QuantizedTensor[Any]:
    """Reads a low-bit layer that another tool wrote: its bits are moved, nothing is quantised again.

    Args:
      paths, gptq_version: see ``layers``.
      name: of the layer: what comes before ".qweight", ".weight_packed", ".weight", ".blocks" or "_blocks".
      expert: which matrix, of a layer with experts.
      reorder_columns: take a layer with a ``StoredLayer.column_order``, in that order, instead of refusing it.
      framework: "numpy" or "torch", whose arrays the result has.

    Raises:
      ValueError: a layer that is not there, whose layout is not known, or that plain storage cannot hold exactly; the
        message names the tensor, the value and the rule. FileNotFoundError: as ``layers``. RuntimeError: a file that
        cannot be read. ImportError: framework "torch" without torch.

    docs/formats.md, "Reading checkpoints", lists layouts and refusals.
    """
    if framework not in ("numpy", "torch"):
        raise ValueError(f"[load] framework is {framework!r}: it must be 'numpy' or 'torch'")
    torch: Any = None
    if framework == "torch":
        # torch by way of its host, which says how to install it.
        from ..hosts.torch import operators, torch  # noqa: F401
    checkpoint = _open(paths, gptq_version)
    layer = _stored(checkpoint.layer(name))
    if expert is None and layer.experts > 0:
        raise ValueError(f"[load] expert is None: layer {name!r} has {layer.experts} of them, from 0")
    assert layer.format is not None  # what is refused was raised
    tensors: Any = [empty(torch, described) for described in _heddle.lowbit_storage(layer.format, *layer.shape)]
    out = QuantizedTensor(layer.format, layer.shape, *tensors)
    checkpoint.load(name, out._parts(), expert or 0, reorder_columns)
    return out
