"""Layers of a model with what stands in front of them, and what they meet on sample inputs, for calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import _heddle
from .block import TransformerBlock
from .linear import Linear
from .policy import FloatLayer, weights_and_x
from .weights import refuse_x


@dataclass(frozen=True)
class Group:
    """Layers behind one module into which their scales can be folded: a norm, or a linear layer of which output k comes from
    the rows `first`, `first + step`, ..."""

    source: Any  # a module with a weight
    layers: tuple[str, ...]
    first: int = 0
    step: int = 1

    def fold(self, scales: torch.Tensor, layers: Mapping[str, FloatLayer]) -> None:
        for parameter in (self.source.weight, self.source.bias if hasattr(self.source, "bias") else None):
            if parameter is not None:
                rows = parameter.data[self.first :: self.step]
                shape = (-1,) + (1,) * (rows.ndim - 1)
                rows.copy_(rows.float() / scales.reshape(shape))
        for name in self.layers:
            weight = layers[name].weight.data
            weight.copy_(weight.float() * scales)


def _behind(source: nn.Module, layers: Sequence[str]) -> Group | None:
    """None: output k of the source is not proportional to parameters of its own."""
    if type(source) in (nn.LayerNorm, nn.RMSNorm) or type(source) is nn.Linear:
        return Group(source, tuple(layers))
    activation = getattr(source, "activation", None) if isinstance(source, Linear) else None
    if activation == "swiglu":
        return Group(source, tuple(layers), 1, 2)
    return Group(source, tuple(layers)) if activation in ("none", "relu") else None


def _of_blocks(module: nn.Module, names: Mapping[int, str]) -> list[Group]:
    found = []
    for block in module.modules():
        if not isinstance(block, TransformerBlock):
            continue
        pairs: list[tuple[nn.Module, Linear]] = [(block.up, block.down)]
        if block.norm_first:  # else the norm's result is the residual too
            pairs += [(block.norm1, block.qkv), (block.norm2, block.up)]
        for source, layer in pairs:
            group = _behind(source, [names[id(layer)]]) if id(layer) in names else None
            if group is not None:
                found.append(group)
    return found


def _given(module: nn.Module, layers: Mapping[str, FloatLayer], name: str, behind: Sequence[str]) -> Group:
    modules = dict(module.named_modules())
    for each in (name, *behind):
        if each not in modules:
            raise ValueError(f"[calibrate] groups: the model has no module '{each}'")
    group = _behind(modules[name], behind)
    if group is None:
        raise ValueError(
            f"[calibrate] groups: '{name}' is a {type(modules[name]).__name__}: it must be a LayerNorm, an RMSNorm "
            "or a linear layer without an activation, with ReLU or with SwiGLU"
        )
    if not behind:
        raise ValueError(f"[calibrate] groups: '{name}' has no layers behind it")
    for each in behind:
        if each not in layers:
            raise ValueError(f"[calibrate] groups: '{each}' is no float linear layer that the policy quantises")
    return group


def _refuse_fold(group: Group, layers: Mapping[str, FloatLayer], owners: Counter[int]) -> str:
    """Why the group's scales cannot be folded; empty if they can."""
    if group.source.weight is None:
        return "the module in front has no weight in floats"
    outputs = group.source.weight.shape[0] // group.step
    for name in group.layers:
        if layers[name].in_features != outputs:
            return f"'{name}' has {layers[name].in_features} inputs, the module in front {outputs} outputs"
    tensors = [
        group.source,
        group.source.weight,
        *(t for name in group.layers for t in (layers[name], layers[name].weight)),
    ]
    return "a module or a parameter is used in several places" if any(owners[id(t)] != 1 for t in tensors) else ""


def groups_of(
    module: nn.Module, layers: Mapping[str, FloatLayer], formats: Mapping[str, str], given: Any
) -> list[Group]:
    """Those behind linear layers first: folding them changes a layer's rows, which its own columns' scales then see."""
    owners = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
    owners += Counter(id(child) for m in module.modules() for child in m._modules.values() if child is not None)
    of_blocks = _of_blocks(module, {id(layer): name for name, layer in layers.items()})
    groups = [group for group in of_blocks if not _refuse_fold(group, layers, owners)]
    for name, behind in given:
        group = _given(module, layers, name, behind)
        reason = _refuse_fold(group, layers, owners)
        if not reason and len({formats[each] for each in behind}) > 1:
            reason = f"its layers must have one format; found {', '.join(formats[each] for each in behind)}"
        if not reason and any(
            set(group.layers) & set(other.layers) or group.source is other.source for other in groups
        ):
            reason = "it, or one of its layers, is in another group"
        if reason:
            raise ValueError(f"[calibrate] groups: '{name}': {reason}")
        groups.append(group)
    return sorted(groups, key=lambda group: isinstance(group.source, (nn.LayerNorm, nn.RMSNorm)))


class Recorder:
    """Inputs of layers: sums of magnitudes over all rows and the largest, and some of the rows, spread evenly over the
    calls."""

    def __init__(self, layers: Mapping[str, FloatLayer], rows_a_call: int) -> None:
        self.rows_a_call = rows_a_call
        self.rows: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
        self.absolute: dict[str, torch.Tensor] = {}
        self.largest: dict[str, torch.Tensor] = {}
        self.count: Counter[str] = Counter()
        self.handles = [
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, layer in layers.items()
        ]

    def _hook(self, name: str) -> Any:
        def record(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            x: Any = arguments[0] if arguments else options.get("x", options.get("input"))
            norm: Any = options.get("norm")
            x = (x if norm is None else norm(x)).detach()
            x = x.reshape(-1, x.shape[-1])
            if x.shape[0] == 0:
                return
            magnitudes = x.abs()
            self.absolute[name] = self.absolute.get(name, 0) + magnitudes.sum(0, dtype=torch.float64)
            largest = magnitudes.amax(0)
            self.largest[name] = torch.maximum(self.largest[name], largest) if name in self.largest else largest
            self.count[name] += x.shape[0]
            step = max(x.shape[0] / self.rows_a_call, 1.0)
            at = [int(i * step) for i in range(min(x.shape[0], self.rows_a_call))]
            self.rows[name].append(x[at].clone())

        return record

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def check_sample(name: str, layer: FloatLayer, format: str, x: Sequence[torch.Tensor]) -> None:
    """What would stop calibration halfway."""
    where = f"[calibrate] layer '{name}', [{layer.out_features}, {layer.in_features}]: "
    weights, x_in_8_bits = weights_and_x(format)
    try:
        _heddle.lowbit_storage(weights, layer.out_features, layer.in_features)
    except ValueError as error:
        raise ValueError(where + str(error)) from error
    if x_in_8_bits and (reason := refuse_x(weights, **x_in_8_bits)):
        raise ValueError(where + reason)
    if not bool(torch.isfinite(layer.weight).all()):
        raise ValueError(where + "a weight is NaN or infinite")
    if not all(bool(torch.isfinite(rows).all()) for rows in x):
        raise ValueError(where + "an input of the sample is NaN or infinite")
    if not any(bool(rows.any()) for rows in x):
        raise ValueError(where + "the sample's inputs are zero everywhere, or there are none")
