"""What of a model of transformers is quantised. heddle.hosts.transformers has the public name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers import register_quantization_config
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ... import _heddle, nn
from ...lowbit import linear_layer
from ...nn.policy import check_format, check_rule, weights_and_x

if TYPE_CHECKING:
    from ..._types import PolicyName, RuleName

METHOD = "heddle"
# GPT-2's names are those of Conv1D, which stores W the other way round, only where nobody knows a layer's class.
_NAMES_OF_CONV1D = re.compile(r"\bc_(attn|fc|proj)\b")


@register_quantization_config(METHOD)
class HeddleConfig(QuantizationConfigMixin):
    """What ``from_pretrained`` is to quantise, for its ``quantization_config``; config.json has it afterwards.

    Args:
      format: of the linear layers that ``heddle.lowbit.linear_layer`` knows by their names as a Transformer's own, which
        output heads, routers and classifiers are not: one of ``heddle.lowbit.FORMATS`` or "16bit", with "+int8_x" or
        "+fp8_x" as in ``heddle.nn.Policy``. None: what policy says alone.
      policy: a ``heddle.nn.Policy`` or its rules, looked at before format, over every torch.nn.Linear.
      modules_to_not_convert: layers that stay as they are, whatever else is said, as transformers means it: what a name
        begins or ends with, or a regular expression.
      scale_rule: see ``heddle.nn.Policy``.
      layers: format by layer, of a model that was saved; save_pretrained writes it.

    Raises:
      ValueError: a format or a rule that there is not, or neither format nor policy. TypeError: what is no name of a format,
        no rules, or no names of layers.
    """

    def __init__(
        self,
        format: PolicyName | None = "nvfp4",
        *,
        policy: nn.Policy | Mapping[str, str] | Iterable[tuple[str, str]] | None = None,
        modules_to_not_convert: Iterable[str] | None = None,
        scale_rule: RuleName | None = None,
        layers: Mapping[str, PolicyName] | None = None,
    ) -> None:
        if policy is not None and not isinstance(policy, nn.Policy):
            policy = nn.Policy(policy)
        if policy is not None and scale_rule is None:
            scale_rule = policy.scale_rule
        if format is None and policy is None and not layers:
            raise ValueError("[HeddleConfig] format and policy are None: one of them must say what is quantised")
        check_rule(scale_rule)
        if isinstance(modules_to_not_convert, str):
            modules_to_not_convert = [modules_to_not_convert]
        if modules_to_not_convert is not None:
            entries = list(modules_to_not_convert) if isinstance(modules_to_not_convert, Iterable) else [None]
            if not all(isinstance(entry, str) for entry in entries):
                raise TypeError(
                    f"[HeddleConfig] modules_to_not_convert is {modules_to_not_convert!r}: it must be a list of strings"
                )
            modules_to_not_convert = entries
        if layers is not None and not isinstance(layers, Mapping):
            raise TypeError(f"[HeddleConfig] layers is {layers!r}: it must be a mapping from layer to format")
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' own are an enumeration
        self.format = None if format is None else check_format(format)
        self.policy = None if policy is None else [list(rule) for rule in policy.rules]
        self.modules_to_not_convert = modules_to_not_convert
        self.scale_rule = scale_rule
        self.layers = None if layers is None else {name: check_format(each) for name, each in layers.items()}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        config_dict = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)

    def chosen(self, model: PreTrainedModel) -> dict[str, PolicyName]:
        """The format of each layer of a model in floats that is to have another one.

        Raises:
          ValueError: no layer; one that its format does not fit; a pattern that decides over nothing; a tied layer that
            the policy names.
        """
        layers = nn.linear_layers(model)
        policy = nn.Policy((pattern, format) for pattern, format in self.policy or [])
        kept = self.modules_to_not_convert or []
        modules = [name for name, _ in model.named_modules()]
        for entry in kept:
            if all(should_convert_module(name, [entry]) for name in modules):
                raise ValueError(
                    f"[HeddleConfig] modules_to_not_convert has {entry!r}, which matches no module of the model"
                )
        open_ = [name for name in layers if not kept or should_convert_module(name, kept)]
        policy.check_names("HeddleConfig", open_)
        tied = {
            end.removesuffix(".weight") for pair in getattr(model, "all_tied_weights_keys", {}).items() for end in pair
        }
        floats = _in_float32(model)
        found: dict[str, PolicyName] = {}
        for name in open_:
            if policy.names(name):
                format = policy.format_of(name)
                if name in tied and format != "float32":
                    raise ValueError(
                        f"[HeddleConfig] policy: layer '{name}' shares its weight with another module (tied embeddings), "
                        "which cannot read it in a format: leave it as it is"
                    )
            elif self.format is None or name in tied or not linear_layer(_NAMES_OF_CONV1D.sub(r"\1", name)):
                continue
            elif floats and not should_convert_module(name, floats):
                continue
            else:
                format = self.format
            if format != "float32":
                check_fit(name, layers[name], format)
                found[name] = format
        if not found:
            raise ValueError(
                f"[HeddleConfig] {type(model).__name__} has no layer to quantise: torch.nn.Linear in a numbered layer, or one "
                "that policy names; Conv1D (GPT-2) and experts in one parameter stay in floats"
            )
        return found


def check_fit(name: str, layer: Any, format: str) -> None:
    weights, _ = weights_and_x(format)
    if weights in ("16bit", "float32"):
        return
    try:
        _heddle.lowbit_storage(weights, layer.out_features, layer.in_features)
    except ValueError as error:
        raise ValueError(
            f"[HeddleConfig] layer '{name}', [{layer.out_features}, {layer.in_features}]: {error}; modules_to_not_convert "
            "or policy can leave it as it is"
        ) from error


def _in_float32(model: PreTrainedModel) -> list[str]:
    """Modules whose outputs the model's makers want in float32, of a model in 16 bits."""
    always = list(getattr(model, "_keep_in_fp32_modules_strict", None) or [])
    if model.dtype == torch.float16:
        return always + list(getattr(model, "_keep_in_fp32_modules", None) or [])
    return always if model.dtype == torch.bfloat16 else []
