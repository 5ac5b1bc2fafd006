"""Which linear layer has which precision. heddle.nn is the public name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn

from .. import _heddle
from ..lowbit.tensor import FORMATS, RULES, default_rule, quantize
from .linear import Linear
from .parallel_linear import ParallelLinear
from .weights import refuse_x

if TYPE_CHECKING:
    from .._types import PolicyName, RuleName

_FLOATS = ("float32", "16bit")
_BLOCKED = re.compile(r"(nf4|fp4_bnb)_b(32|64|128|256|512|1024|2048|4096)")


def weights_and_x(format: str) -> tuple[Any, dict[str, bool]]:
    """Of "nvfp4+fp8_x": "nvfp4", and what it says of x."""
    weights, plus, x = format.partition("+")
    return weights, {"int8_x": x == "int8_x", "fp8_x": x == "fp8_x"} if plus else {}


def with_x(format: PolicyName, layer: nn.Module) -> str:
    """The format with what the layer's own options say of x, where it says nothing itself and quantises."""
    if format in _FLOATS or "+" in format or not isinstance(layer, Linear):
        return format
    return format + ("+int8_x" if layer.int8_x else "+fp8_x" if layer.fp8_x else "")


def format_of(layer: nn.Module) -> PolicyName:
    """What a policy says to have a layer as this one is: "nvfp4+int8_x"; "float32" of one in floats of more than 16 bits."""
    if not isinstance(layer, Linear) or (layer.format is None and layer.weight.element_size() > 2):
        return "float32"
    return "16bit" if layer.format is None else cast("PolicyName", with_x(layer.format, layer))


def literal(name: str) -> str:
    """A pattern that matches that name alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def check_format(format: str) -> PolicyName:
    if not isinstance(format, str):
        raise TypeError(f"[Policy] format is {format!r}: it must be the name of one")
    weights, x = weights_and_x(format)
    if weights not in (*FORMATS, *_FLOATS) and not _BLOCKED.fullmatch(weights):
        raise ValueError(f"[Policy] format is '{format}': it must be one of {', '.join((*FORMATS, *_FLOATS))}")
    if x:
        if not any(x.values()):
            raise ValueError(f"[Policy] format is '{format}': behind + there is int8_x or fp8_x")
        if weights in _FLOATS:
            raise ValueError(f"[Policy] format is '{format}': the format is {weights}, beside which x is not rounded")
        if reason := refuse_x(weights, **x):
            raise ValueError(f"[Policy] format is '{format}': {reason}")
    return cast("PolicyName", format)


def check_rule(rule: RuleName | None) -> None:
    if rule is not None and rule not in RULES:
        raise ValueError(f"[Policy] scale_rule is {rule!r}: it must be one of {', '.join(RULES)}")


class Policy:
    """Formats of layers by name: the first pattern that a name matches decides.

    >>> Policy({"*.out": "int8_row", "blocks.0.*": "16bit", "*": "nvfp4"}).format_of("blocks.3.up")
    'nvfp4'

    A pattern is as for the shell: *, ?, [...] and [!...], over the whole name, dots included; the same in all of
    Heddle. A format is one of ``heddle.lowbit.FORMATS``, "16bit" (weights in bfloat16, unless they have 16 bits) or
    "float32" (as they are); layers that no pattern matches stay as they are. Behind a format "+int8_x" or "+fp8_x"
    rounds x to 8 bits too, as the options of ``Linear`` say: "int8_row+int8_x", "nvfp4+fp8_x".

    Args:
      rules: a mapping, or pairs, from pattern to format, in order.
      scale_rule: how scales are chosen, for all; see ``heddle.lowbit.quantize``. None: "mse" for 4 bits, "plain" for 8.
    """

    def __init__(
        self,
        rules: Mapping[str, str] | Iterable[tuple[str, str]] | PolicyName,
        *,
        scale_rule: RuleName | None = None,
    ) -> None:
        if isinstance(rules, str):
            rules = {"*": rules}
        try:
            pairs = [(pattern, format) for pattern, format in (rules.items() if isinstance(rules, Mapping) else rules)]
        except (TypeError, ValueError):
            raise TypeError(
                f"[Policy] rules is {rules!r}: it must be a mapping or pairs, from pattern to format, or one format"
            ) from None
        for pattern, _ in pairs:
            if not isinstance(pattern, str):
                raise TypeError(f"[Policy] a pattern is {pattern!r}: it must be a string")
        check_rule(scale_rule)
        self.rules: tuple[tuple[str, PolicyName], ...] = tuple(
            (pattern, check_format(format)) for pattern, format in pairs
        )
        self.scale_rule: RuleName | None = scale_rule

    def format_of(self, name: str) -> PolicyName:
        """The format of the layer of that name."""
        rule = self._rule_of(name)
        return "float32" if rule is None else self.rules[rule][1]

    def _rule_of(self, name: str) -> int | None:
        return next((i for i, (pattern, _) in enumerate(self.rules) if _heddle.layer_matches(pattern, name)), None)

    def names(self, name: str) -> bool:
        """Whether a pattern matches the layer's name."""
        return self._rule_of(name) is not None

    def check_names(self, operation: str, names: Iterable[str]) -> None:
        """Raises ValueError for a pattern that decides over none of these layers, as a misspelt one does."""
        names = list(names)
        deciding = {self._rule_of(name) for name in names}
        for i, (pattern, _) in enumerate(self.rules):
            if i in deciding:
                continue
            if any(_heddle.layer_matches(pattern, name) for name in names):
                why = "decides over no layer: patterns before it match each that it matches"
            else:
                why = f"matches no layer: {_shown(names)}"
            raise ValueError(f"[{operation}] policy: pattern {pattern!r} {why}")

    def __repr__(self) -> str:
        return f"Policy({dict(self.rules)!r})"


def _shown(names: list[str]) -> str:
    """A few of the layers' names, for an error."""
    if not names:
        return "the module has no linear layer in floats"
    return "names are " + ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_float_layer(module: nn.Module | None) -> bool:
    # Not subclasses: whoever made them may read their weights (torch's attention does).
    return type(module) is nn.Linear or (isinstance(module, Linear) and module.format is None)


#: torch's Linear or heddle.nn's, with weights in floats.
FloatLayer: TypeAlias = "nn.Linear | Linear"


def linear_layers(module: nn.Module) -> dict[str, FloatLayer]:
    """The layers of a module that can be quantised, by name; "" is the module itself."""
    return {name: cast(FloatLayer, found) for name, found in module.named_modules() if _is_float_layer(found)}


def converted(
    name: str,
    layer: FloatLayer,
    format: str,
    rule: RuleName | None,
    importance: Any,
    *,
    pack: bool = True,
    empty: bool = False,
) -> Linear:
    """Another layer, which shares what floats it keeps. pack: now, or by its first call. empty: on the meta device, of a
    layer there, for a loader that brings what its state has."""
    options: dict[str, Any] = {}
    if isinstance(layer, ParallelLinear):
        raise ValueError(
            f"[quantize_model] layer '{name}' is a {type(layer).__name__}, a rank's share: quantise the whole before it is split, or "
            "call the layer's own quantize()"
        )
    if isinstance(layer, Linear):
        options = {name: getattr(layer, name) for name in ("activation", "int8_x", "fp8_x", "keep_16bit")}
    weights, x = weights_and_x(format)
    options |= x
    try:
        if weights not in _FLOATS and pack:
            return Linear.from_linear(layer, weights, rule=rule, importance=importance, **options)
        found = Linear.from_linear(layer, **options)
        if empty and weights not in _FLOATS:
            found.await_state(weights, "meta")
        elif weights not in _FLOATS:
            rule = default_rule(weights) if rule is None else rule
            found.hold(quantize(layer.weight, weights, rule=rule, importance=importance))
        elif weights == "16bit" and layer.weight.element_size() > 2:
            weight = layer.weight.detach().to(torch.bfloat16)
            found.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
        return found
    except ValueError as error:
        raise ValueError(
            f"[quantize_model] layer '{name}', [{layer.out_features}, {layer.in_features}]: {error}"
        ) from error


class Replacement:
    """Puts other layers in the place of a module's own, wherever those stand, and the own ones back."""

    def __init__(self, module: nn.Module) -> None:
        self.places: dict[int, list[tuple[nn.Module, str]]] = {}
        for parent in module.modules():
            for name, child in parent._modules.items():  # each of its names; named_children() tells of a child once
                self.places.setdefault(id(child), []).append((parent, name))

    def put(self, old: nn.Module, new: nn.Module) -> None:
        for parent, name in self.places[id(old)]:
            setattr(parent, name, new)


def replace_layers(module: nn.Module, layers: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    """Puts new layers where those of the same names in `layers` stand."""
    replacement = Replacement(module)
    for name, layer in new.items():
        replacement.put(layers[name], layer)
    for parent in module.modules():
        # Its fast path in inference reads the weights of its layers past their forward.
        if isinstance(parent, nn.TransformerEncoderLayer) and isinstance(parent.linear1, Linear):
            parent.activation_relu_or_gelu = 0


def quantize_model(
    module: nn.Module,
    policy: Policy | Mapping[str, str] | PolicyName,
    *,
    importance: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Replaces the torch.nn.Linear (and float heddle.nn.Linear) layers of any module, in place, as a policy says.

    Args:
      module: changed, unless it is itself such a layer.
      policy: a ``Policy``, its rules, or one format for all layers: an output head and a router too, whatever their
        names are, which ``heddle.lowbit.quantize_checkpoint`` leaves alone by theirs. {"lm_head": "float32", "*":
        "nvfp4"} keeps one.
      importance: by layer's name, [K]; see ``heddle.lowbit.quantize``. Names of layers that stay as they are may be
        among them.

    Returns:
      module; where it is itself a linear layer, the new one.

    Raises:
      ValueError: a layer that its format does not fit, by name; a pattern that decides over no layer; importance for
        what is no layer. Nothing has been replaced.
    """
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    layers = linear_layers(module)
    policy.check_names("quantize_model", layers)
    for name in importance or ():
        if name not in layers:
            known = _shown(list(layers))
            raise ValueError(f"[quantize_model] importance has {name!r}, which is no linear layer: {known}")
    chosen = {name: policy.format_of(name) for name in layers}
    new = {
        name: converted(name, layers[name], format, policy.scale_rule, (importance or {}).get(name))
        for name, format in chosen.items()
        if format != "float32"
    }
    if "" in layers:
        return new.get("", module)
    replace_layers(module, layers, new)
    return module


def load_quantized(module: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> nn.Module:
    """Loads the state of a quantised model into one in floats: linear layers that the state has in a format are replaced,
    in place, and then ``load_state_dict`` does the rest.

    >>> torch.save(model.state_dict(), "model.pt")          # of a model that quantize_model changed
    >>> heddle.nn.load_quantized(Model(), torch.load("model.pt", weights_only=True))

    Args:
      module: built as the saved one was before it was quantised; on the meta device too, whose parameters are then the
        state's own tensors. A linear layer itself stays one only if it is a ``heddle.nn.Linear``.
      state: of plain and packed layers alike. Whether x is rounded to 8 bits is no part of it: set ``int8_x`` or ``fp8_x``
        of the layers.
      strict: as for ``load_state_dict``.

    Returns:
      module.

    Raises:
      ValueError: a state without a quantised layer, or with one where the module has no linear layer; nothing has been
        replaced. TypeError: no module, or no state of one. RuntimeError: as ``load_state_dict`` raises it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"[load_quantized] module is a {type(module).__name__}: it must be a torch.nn.Module")
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(
            f"[load_quantized] state is a {type(state).__name__}: it must be a mapping from name to tensor, as state_dict() gives it"
        )
    for name, value in state.items():
        if name.split(".")[-1] == "format_name" and not isinstance(value, torch.Tensor):
            raise TypeError(f"[load_quantized] state has a {type(value).__name__} for '{name}': it must be a tensor")
    modules = dict(module.named_modules(remove_duplicate=False))
    stored = [name.removesuffix("format_name").rstrip(".") for name in state if name.split(".")[-1] == "format_name"]
    if not stored:
        raise ValueError("[load_quantized] state has no layer in a format: load_state_dict takes states in floats")
    for name in stored:
        if not _is_float_layer(found := modules.get(name)) and not isinstance(found, Linear):
            raise ValueError(
                f"[load_quantized] state has '{name}' in a format, where the module has no linear layer: "
                f"{_shown(list(linear_layers(module)))}"
            )
    meta = any(tensor.is_meta for tensor in module.state_dict().values())
    once = {id(modules[name]): name for name in stored if not isinstance(modules[name], Linear)}
    new = {name: Linear.from_linear(modules[name]) for name in once.values()}
    if "" in new:
        raise ValueError(
            "[load_quantized] module is a torch.nn.Linear, which cannot be replaced in itself: heddle.nn.Linear"
        )
    replace_layers(module, modules, new)
    module.load_state_dict(state, strict=strict, assign=meta)
    return module
