"""Calibration of a model's linear layers on sample inputs. heddle.nn is the public name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import _heddle
from ._lowbit_calibrate import calibrate as calibrate_matrices
from ._nn_block import TransformerBlock
from ._nn_linear import Linear
from ._nn_policy import _FLOATS, Policy, linear_layers, weights_and_x


@dataclass(frozen=True)
class LayerCalibration:
    """Of one layer: its format, the alpha of the scales in front of it (None: nothing could be folded), and the relative
    error of its output on the sample, quantised as it was and as it is now with ``importance``."""

    format: str
    alpha: float | None
    plain_error: float
    error: float


@dataclass(frozen=True)
class CalibrationReport:
    """What ``calibrate`` measured.

    Attributes:
      layers: by name, what calibration changes.
      importance: by name, [K], for ``quantize_model``; a layer whose rule does better without has none.
    """

    layers: dict[str, LayerCalibration]
    importance: dict[str, torch.Tensor] = field(repr=False)

    def __str__(self) -> str:
        width = max([5, *map(len, self.layers)])
        lines = [f"{'layer':{width}} {'format':>12} {'alpha':>6} {'plain error':>12} {'error':>12}"]
        for name, found in self.layers.items():
            alpha = "-" if found.alpha is None else f"{found.alpha:.2f}"
            lines.append(f"{name:{width}} {found.format:>12} {alpha:>6} {found.plain_error:12.3e} {found.error:12.3e}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Group:
    """Layers behind one module into which their scales can be folded: a norm, or a linear layer of which output k comes from
    the rows `first`, `first + step`, ..."""

    source: nn.Module
    layers: tuple[str, ...]
    first: int = 0
    step: int = 1

    def fold(self, scales: torch.Tensor, layers: Mapping[str, nn.Module]) -> None:
        for parameter in (self.source.weight, self.source.bias if hasattr(self.source, "bias") else None):
            if parameter is not None:
                rows = parameter.data[self.first :: self.step]
                shape = (-1,) + (1,) * (rows.ndim - 1)
                rows.copy_(rows.float() / scales.reshape(shape))
        for name in self.layers:
            weight = layers[name].weight.data
            weight.copy_(weight.float() * scales)


def _behind(source: nn.Module, layers: Sequence[str]) -> _Group | None:
    """None: output k of the source is not proportional to parameters of its own."""
    if type(source) in (nn.LayerNorm, nn.RMSNorm) or type(source) is nn.Linear:
        return _Group(source, tuple(layers))
    activation = getattr(source, "activation", None) if isinstance(source, Linear) else None
    if activation == "swiglu":
        return _Group(source, tuple(layers), 1, 2)
    return _Group(source, tuple(layers)) if activation in ("none", "relu") else None


def _of_blocks(module: nn.Module, names: Mapping[int, str]) -> list[_Group]:
    found = []
    for block in module.modules():
        if not isinstance(block, TransformerBlock):
            continue
        pairs = [(block.up, block.down)]
        if block.norm_first:  # else the norm's result is the residual too
            pairs += [(block.norm1, block.qkv), (block.norm2, block.up)]
        for source, layer in pairs:
            group = _behind(source, [names[id(layer)]]) if id(layer) in names else None
            if group is not None:
                found.append(group)
    return found


def _given(module: nn.Module, layers: Mapping[str, nn.Module], name: str, behind: Sequence[str]) -> _Group:
    modules = dict(module.named_modules())
    for each in (name, *behind):
        if each not in modules:
            raise ValueError(f"[calibrate] groups: the model has no module '{each}'")
    group = _behind(modules[name], behind)
    if group is None:
        raise ValueError(f"[calibrate] groups: '{name}' is a {type(modules[name]).__name__}: it must be a LayerNorm, an RMSNorm "
                         "or a linear layer without an activation, with ReLU or with SwiGLU")  # fmt: skip
    if not behind:
        raise ValueError(f"[calibrate] groups: '{name}' has no layers behind it")
    for each in behind:
        if each not in layers:
            raise ValueError(f"[calibrate] groups: '{each}' is no float linear layer that the policy quantises")
    return group


def _refuse_fold(group: _Group, layers: Mapping[str, nn.Module], owners: Counter[int]) -> str:
    """Why the group's scales cannot be folded; empty if they can."""
    if group.source.weight is None:
        return "the module in front has no weight in floats"
    outputs = group.source.weight.shape[0] // group.step
    for name in group.layers:
        if layers[name].in_features != outputs:
            return f"'{name}' has {layers[name].in_features} inputs, the module in front {outputs} outputs"
    tensors = [group.source, group.source.weight, *(t for name in group.layers for t in (layers[name], layers[name].weight))]
    return "a module or a parameter is used in several places" if any(owners[id(t)] != 1 for t in tensors) else ""


def _groups(module: nn.Module, layers: Mapping[str, nn.Module], formats: Mapping[str, str], given: Any) -> list[_Group]:
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
        if not reason and any(set(group.layers) & set(other.layers) or group.source is other.source for other in groups):
            reason = "it, or one of its layers, is in another group"
        if reason:
            raise ValueError(f"[calibrate] groups: '{name}': {reason}")
        groups.append(group)
    return sorted(groups, key=lambda group: isinstance(group.source, (nn.LayerNorm, nn.RMSNorm)))


class _Recorder:
    """Inputs of layers: sums over all rows, and some of the rows, spread evenly over the calls."""

    def __init__(self, layers: Mapping[str, nn.Module], rows_a_call: int) -> None:
        self.rows_a_call = rows_a_call
        self.rows: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
        self.absolute: dict[str, torch.Tensor] = {}
        self.count: Counter[str] = Counter()
        self.handles = [
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, layer in layers.items()
        ]

    def _hook(self, name: str) -> Any:
        def record(layer, arguments, options):
            x = arguments[0] if arguments else options.get("x", options.get("input"))
            norm = options.get("norm")
            x = (x if norm is None else norm(x)).detach()
            x = x.reshape(-1, x.shape[-1])
            if x.shape[0] == 0:
                return
            absolute = x.abs().sum(0, dtype=torch.float64)
            self.absolute[name] = self.absolute.get(name, 0) + absolute
            self.count[name] += x.shape[0]
            step = max(x.shape[0] / self.rows_a_call, 1.0)
            at = [int(i * step) for i in range(min(x.shape[0], self.rows_a_call))]
            self.rows[name].append(x[at].clone())

        return record

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _check(name: str, layer: nn.Module, format: str, x: Sequence[torch.Tensor]) -> None:
    """What would stop calibration halfway."""
    where = f"[calibrate] layer '{name}', [{layer.out_features}, {layer.in_features}]: "
    try:
        _heddle.lowbit_storage(weights_and_x(format)[0], layer.out_features, layer.in_features)
    except ValueError as error:
        raise ValueError(where + str(error)) from error
    if not bool(torch.isfinite(layer.weight).all()):
        raise ValueError(where + "a weight is NaN or infinite")
    if not all(bool(torch.isfinite(rows).all()) for rows in x):
        raise ValueError(where + "an input of the sample is NaN or infinite")
    if not any(bool(rows.any()) for rows in x):
        raise ValueError(where + "the sample's inputs are zero everywhere, or there are none")


@torch.no_grad()
def calibrate(
    module: nn.Module,
    sample_inputs: Any,
    policy: Policy | Mapping[str, str] | str,
    *,
    groups: Sequence[tuple[str, Sequence[str]]] = (),
    rows: int = 2048,
    steps: int = 20,
) -> CalibrationReport:
    """Prepares a model's float layers for ``quantize_model`` by what they meet on sample inputs.

    Records the inputs of each layer that the policy quantises. Where layers stand behind a module into which scales of their
    columns can be folded, searches those with ``heddle.lowbit.calibrate`` and folds them, in place: the model computes what it
    did, to rounding. These are, in a ``TransformerBlock``, ``qkv`` and ``up`` behind their norms (norm first), and ``down``
    behind ``up`` (SwiGLU, its up rows; ReLU). For other models `groups` names them. Of each layer measures the error.

    >>> report = heddle.nn.calibrate(model, sample, "nvfp4")                              # doctest: +SKIP
    >>> heddle.nn.quantize_model(model, "nvfp4", importance=report.importance)            # doctest: +SKIP

    Args:
      module: a model or a block in eval mode.
      sample_inputs: as for ``choose_policy``.
      policy: as for ``quantize_model``; layers in floats are left alone.
      groups: pairs of the name of a LayerNorm or RMSNorm, or of a linear layer, and the names of all the layers that take
        its output, and nothing else does: ("layers.0.input_layernorm", ["layers.0.self_attn.q_proj", ...]).
      rows: of its inputs that a layer's errors are measured on, at most.
      steps: as for ``heddle.lowbit.calibrate``.

    Raises:
      ValueError: a module in training mode, a layer that its format does not fit, that the sample does not reach or whose
        numbers are not finite, a group that does not fit; nothing has been folded.
    """
    if any(m.training for m in module.modules()):
        raise ValueError("[calibrate] module is in training mode, where dropout would be recorded: call eval() on it")
    if not (isinstance(rows, int) and rows >= 1):
        raise ValueError(f"[calibrate] rows is {rows}: it must be a positive integer")
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    formats = {name: policy.format_of(name) for name in linear_layers(module)}
    layers = {name: layer for name, layer in linear_layers(module).items() if formats[name] not in _FLOATS}
    if not layers:
        raise ValueError("[calibrate] the policy quantises no layer of the module: there is nothing to calibrate")
    chosen = _groups(module, layers, formats, groups)

    samples = sample_inputs if isinstance(sample_inputs, list) else [sample_inputs]
    recorder = _Recorder(layers, max(rows // max(len(samples), 1), 1))
    try:
        for sample in samples:
            module(*(sample if isinstance(sample, tuple) else (sample,)))
    finally:
        recorder.remove()
    for name, layer in layers.items():
        _check(name, layer, formats[name], recorder.rows[name])

    grouped = {name for group in chosen for name in group.layers}
    measured: dict[str, LayerCalibration] = {}
    importance: dict[str, torch.Tensor] = {}
    for group in [*chosen, *(_Group(layer, (name,)) for name, layer in layers.items() if name not in grouped)]:
        names, first = group.layers, group.layers[0]
        folds = first in grouped
        calibration = calibrate_matrices(
            [layers[name].weight for name in names],
            torch.cat(recorder.rows[first]),
            format=weights_and_x(formats[first])[0],
            rule=policy.scale_rule,
            absmean=(recorder.absolute[first] / recorder.count[first]).float(),
            steps=steps if folds else 0,
        )
        if folds:
            group.fold(calibration.scales, layers)
        for i, name in enumerate(names):
            measured[name] = LayerCalibration(
                formats[name], calibration.alpha if folds else None, calibration.plain_errors[i], calibration.errors[i]
            )
            if calibration.importance is not None:
                importance[name] = calibration.importance
    return CalibrationReport({name: measured[name] for name in layers}, importance)
