"""Calibration of a model's linear layers on sample inputs. heddle.nn is the public name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..lowbit.calibration import calibrate as calibrate_matrices
from .groups import Group, Recorder, check_sample, groups_of
from .policy import _FLOATS, Policy, linear_layers, weights_and_x, with_x

if TYPE_CHECKING:
    from .._types import CalibrationMethod, PolicyName


@dataclass(frozen=True)
class LayerCalibration:
    """Of one layer: its format, with what rounds x; whose scales are in front of it ("awq", "smoothquant", "none" where they
    are 1) and their alpha (both None: nothing could be folded); and the relative error of its output on the sample, quantised
    as it was and as it is now with ``importance``."""

    format: str
    method: str | None
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
        lines = [f"{'layer':{width}} {'format':>15} {'scales':>16} {'plain error':>12} {'error':>12}"]
        for name, found in self.layers.items():
            scales = found.method if found.alpha in (None, 0) else f"{found.method} {found.alpha:.2f}"
            lines.append(
                f"{name:{width}} {found.format:>15} {scales or '-':>16} {found.plain_error:12.3e} {found.error:12.3e}"
            )
        return "\n".join(lines)


@torch.no_grad()
def calibrate(
    module: nn.Module,
    sample_inputs: Any,
    policy: Policy | Mapping[str, str] | PolicyName,
    *,
    groups: Sequence[tuple[str, Sequence[str]]] = (),
    rows: int = 2048,
    methods: Sequence[CalibrationMethod] | None = None,
    steps: int = 20,
) -> CalibrationReport:
    """Prepares a model's float layers for ``quantize_model`` by what they meet on sample inputs.

    Records the inputs of each layer that the policy quantises. Where layers stand behind a module into which scales of their
    columns can be folded, searches those with ``heddle.lowbit.calibrate`` and folds them, in place: the model computes what it
    did, to rounding. These are, in a ``TransformerBlock``, ``qkv`` and ``up`` behind their norms (norm first), and ``down``
    behind ``up`` (SwiGLU, its up rows; ReLU). For other models `groups` names them. Of each layer measures the error. Where the
    policy rounds x to 8 bits ("int8_row+int8_x"), or the layer does, errors are measured so and SmoothQuant's scales are tried
    too.

    >>> report = heddle.nn.calibrate(model, sample, "nvfp4")                              # doctest: +SKIP
    >>> heddle.nn.quantize_model(model, "nvfp4", importance=report.importance)            # doctest: +SKIP

    Args:
      module: a model or a block in eval mode.
      sample_inputs: as for ``choose_policy``.
      policy: as for ``quantize_model``; layers in floats are left alone.
      groups: pairs of the name of a LayerNorm or RMSNorm, or of a linear layer, and the names of all the layers that take
        its output, and nothing else does: ("layers.0.input_layernorm", ["layers.0.self_attn.q_proj", ...]).
      rows: of its inputs that a layer's errors are measured on, at most.
      methods, steps: as for ``heddle.lowbit.calibrate``.

    Raises:
      ValueError: a module in training mode, a layer that its format does not fit, that the sample does not reach or whose
        numbers are not finite, a group that does not fit, a pattern that decides over no layer; nothing has been
        folded.
    """
    if any(m.training for m in module.modules()):
        raise ValueError("[calibrate] module is in training mode, where dropout would be recorded: call eval() on it")
    if not (isinstance(rows, int) and rows >= 1):
        raise ValueError(f"[calibrate] rows is {rows}: it must be a positive integer")
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    policy.check_names("calibrate", linear_layers(module))
    formats = {name: with_x(policy.format_of(name), layer) for name, layer in linear_layers(module).items()}
    layers = {name: layer for name, layer in linear_layers(module).items() if formats[name] not in _FLOATS}
    if not layers:
        raise ValueError("[calibrate] the policy quantises no layer of the module: there is nothing to calibrate")
    chosen = groups_of(module, layers, formats, groups)

    samples = sample_inputs if isinstance(sample_inputs, list) else [sample_inputs]
    recorder = Recorder(layers, max(rows // max(len(samples), 1), 1))
    try:
        for sample in samples:
            module(*(sample if isinstance(sample, tuple) else (sample,)))
    finally:
        recorder.remove()
    for name, layer in layers.items():
        check_sample(name, layer, formats[name], recorder.rows[name])

    grouped = {name for group in chosen for name in group.layers}
    measured: dict[str, LayerCalibration] = {}
    importance: dict[str, torch.Tensor] = {}
    for group in [*chosen, *(Group(layer, (name,)) for name, layer in layers.items() if name not in grouped)]:
        names, first = group.layers, group.layers[0]
        folds = first in grouped
        format, x = weights_and_x(formats[first])
        calibration = calibrate_matrices(
            [layers[name].weight for name in names],
            torch.cat(recorder.rows[first]),
            format=format,
            rule=policy.scale_rule,
            absmean=(recorder.absolute[first] / recorder.count[first]).float(),
            absmax=recorder.largest[first].float(),
            methods=methods,
            steps=steps if folds else 0,
            **x,
        )
        if folds:
            group.fold(calibration.scales, layers)
        for i, name in enumerate(names):
            method, alpha = (calibration.method, calibration.alpha) if folds else (None, None)
            measured[name] = LayerCalibration(
                formats[name], method, alpha, calibration.plain_errors[i], calibration.errors[i]
            )
            if calibration.importance is not None:
                importance[name] = calibration.importance
    return CalibrationReport({name: measured[name] for name in layers}, importance)
