"""The precision of each linear layer by what it costs the output. heddle.nn is the public name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .linear import Linear
from .policy import FloatLayer, Policy, Replacement, check_format, converted, linear_layers, literal

if TYPE_CHECKING:
    from .._types import PolicyName, RuleName


@dataclass(frozen=True)
class PolicyReport:
    """What ``choose_policy`` measured and chose.

    Attributes:
      policy: every layer by its name; for ``quantize_model``.
      error: relative error of the output with that policy, measured.
      predicted: the same from the layers' own errors, as if they were independent.
      sensitivity: by layer and format, the relative error of the output with that layer alone quantised.
      bits_per_weight: of all layers together, with their scales.
      weights: by layer, how many.
    """

    policy: Policy
    error: float
    predicted: float
    sensitivity: dict[str, dict[str, float]]
    bits_per_weight: float
    weights: dict[str, int] = field(repr=False)

    def __str__(self) -> str:
        formats = list(dict.fromkeys(f for errors in self.sensitivity.values() for f in errors))
        width = max(len(name) for name in self.sensitivity)
        lines = [f"{'layer':{width}} {'weights':>12}" + "".join(f" {f:>12}" for f in formats) + "  chosen"]
        for name, errors in self.sensitivity.items():
            cells = "".join(f" {errors[f]:12.3e}" if f in errors else f" {'-':>12}" for f in formats)
            lines.append(f"{name:{width}} {self.weights[name]:12d}{cells}  {self.policy.format_of(name)}")
        lines.append(
            f"error {self.error:.3e} (predicted {self.predicted:.3e}), {self.bits_per_weight:.2f} bits a weight"
        )
        return "\n".join(lines)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    if isinstance(output, Iterable) and not isinstance(output, (str, bytes)):
        return [t for part in output for t in _tensors(part)]
    return []


def _bits(layer: FloatLayer) -> float:
    weight = layer.weight_bytes if isinstance(layer, Linear) else layer.weight.nbytes
    return 8.0 * weight


@torch.no_grad()
def choose_policy(
    module: nn.Module,
    sample_inputs: Any,
    *,
    error: float,
    formats: Iterable[PolicyName] = ("nvfp4", "int8_row", "16bit"),
    scale_rule: RuleName | None = None,
) -> PolicyReport:
    """The formats that meet an error with few bits, found by measuring each layer.

    Each layer alone is quantised to each format, and the relative error of the output, |y' - y| / |y| over all sample
    inputs, is its sensitivity. From the smallest format everywhere, the layer whose next format saves most squared error
    for a bit is promoted, until the error of all together, first predicted and then measured, is met. "float32", the layer
    as it is, ends every list.

    Args:
      module: a model or a block in eval mode; it is unchanged afterwards.
      sample_inputs: one call's input: a tensor, or a tuple of positional arguments; or a list of such.
      error: the relative error of the output to be met.
      formats: what a layer may become; a layer whose K a format does not fit is not given it.
      scale_rule: as for ``Policy``.

    Raises:
      ValueError: no layer, a module in training mode (dropout would be measured as an error), an output that is no tensor,
        not finite or zero.
    """
    if any(m.training for m in module.modules()):
        raise ValueError(
            "[choose_policy] module is in training mode, where dropout would be measured: call eval() on it"
        )
    if not error >= 0:
        raise ValueError(f"[choose_policy] error is {error}: it must not be negative")
    layers = linear_layers(module)
    if not layers or "" in layers:
        raise ValueError("[choose_policy] module has no linear layers inside: it must be a model or a block")
    samples = sample_inputs if isinstance(sample_inputs, list) else [sample_inputs]
    calls = [sample if isinstance(sample, tuple) else (sample,) for sample in samples]

    def outputs() -> list[torch.Tensor]:
        return [t.double() for call in calls for t in _tensors(module(*call)) if t.is_floating_point()]

    exact = outputs()
    size = math.sqrt(sum((t**2).sum().item() for t in exact))
    if not (0 < size < math.inf):
        raise ValueError(f"[choose_policy] the output's norm is {size}: errors relative to it have no meaning")
    replacement = Replacement(module)

    def measured(changes: Mapping[str, nn.Module]) -> float:
        """The error with other layers in the places of some."""
        try:
            for name, layer in changes.items():
                replacement.put(layers[name], layer)
            return math.sqrt(sum(((a - b) ** 2).sum().item() for a, b in zip(outputs(), exact))) / size
        finally:
            for name in changes:
                replacement.put(layers[name], layers[name])

    sensitivity: dict[str, dict[str, float]] = {}
    options: dict[str, list[tuple[float, float, PolicyName]]] = {}  # bits, error, format; more bits and less error each
    for name, layer in layers.items():
        sensitivity[name] = {}
        found: list[tuple[float, float, PolicyName]] = [(_bits(layer), 0.0, "float32")]
        wanted: dict[PolicyName, None] = {check_format(format): None for format in formats}
        for format in wanted:
            if format == "float32" or (format == "16bit" and layer.weight.element_size() <= 2):
                continue
            try:
                other = converted(name, layer, format, scale_rule, None)
                alone = measured({name: other})
            except ValueError as refused:  # by the format, or by the device's kernels
                if "multiple" in str(refused):
                    continue
                raise
            sensitivity[name][format] = alone
            found.append((_bits(other), sensitivity[name][format], format))
        found.sort()
        options[name] = [o for i, o in enumerate(found) if all(o[1] < earlier[1] for earlier in found[:i])]

    level = dict.fromkeys(layers, 0)

    def chosen(name: str) -> tuple[float, float, PolicyName]:
        return options[name][level[name]]

    def predicted() -> float:
        return math.sqrt(sum(chosen(name)[1] ** 2 for name in layers))

    def promote() -> None:
        def gain(name: str) -> float:
            (bits, now, _), (more, then, _) = options[name][level[name] : level[name] + 2]
            return (now**2 - then**2) / (more - bits)

        open_ = [name for name in layers if level[name] + 1 < len(options[name])]
        level[max(open_, key=gain)] += 1

    made: dict[str, tuple[str, nn.Module]] = {}

    def found_error() -> float:
        for name in layers:
            format = chosen(name)[2]
            if format == "float32":
                made.pop(name, None)
            elif name not in made or made[name][0] != format:
                made[name] = format, converted(name, layers[name], format, scale_rule, None)
        return measured({name: layer for name, (_, layer) in made.items()})

    while predicted() > error:
        promote()
    while (reached := found_error()) > error:
        promote()
    weights = {name: layer.weight.numel() for name, layer in layers.items()}
    policy = Policy([(literal(name), chosen(name)[2]) for name in layers], scale_rule=scale_rule)
    bits = sum(chosen(name)[0] for name in layers) / max(sum(weights.values()), 1)
    return PolicyReport(policy, reached, predicted(), sensitivity, bits, weights)
