"""Which weights of a model have which precision, and why the others stayed. heddle.nn is the public name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .policy import format_of
from .weights import StoredWeights


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a model.

    Attributes:
      what: its format, "nvfp4+int8_x"; of one in floats what it is: "Linear", "Embedding", "Conv1D", "GptOssExperts".
      shape: of the weight, (N, K) of a linear layer.
      bytes: as the state has it.
      shared: names of other parameters that are the same one, as an output head's that is tied to the embeddings.
    """

    what: str
    shape: tuple[int, ...]
    bytes: int
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightsReport:
    """``weights_report``'s: by name, layers in a format, and parameters of two extents or more that are in floats."""

    layers: dict[str, StoredWeight]
    floats: dict[str, StoredWeight]

    def __str__(self) -> str:
        width = max(map(len, (*self.layers, *self.floats)), default=0)
        lines = []
        for name, weight in (*self.layers.items(), *self.floats.items()):
            shared = f", shared with {', '.join(weight.shared)}" if weight.shared else ""
            in_floats = " in floats" if name in self.floats else ""
            lines.append(
                f"{name:{width}} {list(weight.shape)!s:>16} {weight.bytes:12d}  {weight.what}{in_floats}{shared}"
            )
        low, high = (sum(weight.bytes for weight in found.values()) for found in (self.layers, self.floats))
        lines.append(f"{len(self.layers)} layers in {low} bytes, {len(self.floats)} weights in floats in {high} bytes")
        return "\n".join(lines)


def weights_report(module: nn.Module) -> WeightsReport:
    """What ``quantize_model`` changed of a model and what it left: embeddings, layers that no pattern named, and weights of
    modules that are no linear layers, as GPT-2's Conv1D and experts in one parameter of three extents.

    >>> print(heddle.nn.weights_report(model))
    """
    layers: dict[str, StoredWeight] = {}
    floats: dict[str, StoredWeight] = {}
    names: dict[int, list[str]] = {}
    for name, found in module.named_modules():
        if isinstance(found, StoredWeights) and (format := format_of(found)) != "float32":
            shape = (found.out_features, found.in_features)
            layers[name] = StoredWeight(format, shape, found.weight_bytes)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.dim() >= 2:
            names.setdefault(id(parameter), []).append(name)
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2 or name.rpartition(".")[0] in layers:
            continue
        owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
        others = tuple(other for other in names[id(parameter)] if other != name)
        floats[name] = StoredWeight(owner, tuple(parameter.shape), parameter.nbytes, others)
    return WeightsReport(layers, floats)
