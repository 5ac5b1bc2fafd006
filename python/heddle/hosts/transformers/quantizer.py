"""Models of transformers with linear layers in 4 and 8 bits: quantised as they are loaded, saved, and loaded again.
heddle.hosts.transformers has the public names."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantizer

from ... import _heddle, nn
from ...nn.policy import converted, format_of, literal, replace_layers, weights_and_x
from .quantization_config import METHOD, HeddleConfig, check_fit

if TYPE_CHECKING:
    from ..._types import PolicyName

BYTES = {0: 4, 1: 2, 2: 2}  # of heddle::DType, of scales and codes; the others have 1


class _Quantise(ConversionOps):
    """A layer in floats by one in a format, when its weight has been read."""

    def __init__(self, quantizer: HeddleQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **loading: Any
    ) -> dict[str, Any]:
        rest = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            if self.quantizer.param_needs_quantization(loading["model"], name):
                self.quantizer.put(loading["model"], name.removesuffix(".weight"), weight)
                loading["missing_keys"].discard(name)
            else:
                rest[name] = weight
        return rest


@register_quantizer(METHOD)
class HeddleQuantizer(HfQuantizer):
    """transformers' side of ``HeddleConfig``: from_pretrained and save_pretrained call it."""

    requires_calibration = False
    quantization_config: HeddleConfig

    def __init__(self, quantization_config: HeddleConfig, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(quantization_config), **kwargs)  # of this model alone
        self._formats: dict[str, PolicyName] = {}  # by layer of the model that is being loaded

    def validate_environment(self, device_map: Any = None, **_: Any) -> None:
        devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(
                f"[HeddleConfig] device_map has {', '.join(sorted(devices))}: low-bit layers run where they are, on CPUs or on "
                "GPUs, and are not moved for each call"
            )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config, layers = self.quantization_config, nn.linear_layers(model)
        if not self.pre_quantized:
            self._formats = config.chosen(model)
            return
        for name, format in (config.layers or {}).items():
            prefix = model.base_model_prefix
            other = name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
            found = next((each for each in (name, other) if each in layers), None)
            if found is not None:  # else a head that this class does not have
                self._formats[found] = format
        if not self._formats:
            raise ValueError(
                f"[HeddleConfig] config.json's quantization_config has {len(config.layers or {})} layers, and none of "
                f"{type(model).__name__}: save_pretrained of a quantised model writes them"
            )
        new = {}
        for name, format in self._formats.items():
            check_fit(name, layers[name], format)
            new[name] = converted(name, layers[name], format, None, None, pack=False, empty=True)
            if new[name].format is not None:
                stand_in(new[name], torch.empty(1, dtype=torch.uint8, device="meta"))
        replace_layers(model, layers, new)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **rest: Any) -> bool:
        layer, _, parameter = param_name.rpartition(".")
        return not self.pre_quantized and parameter == "weight" and layer in self._formats

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        layer, _, parameter = param_name.rpartition(".")
        if layer not in self._formats or parameter == "bias":
            return param.element_size()
        if self.pre_quantized:
            return 2 * param.element_size()  # packed weights lie beside plain storage
        weights = weights_and_x(self._formats[layer])[0]
        if weights == "16bit":
            return min(param.element_size(), 2)
        stored = _heddle.lowbit_storage(weights, *param.shape)
        sizes = [math.prod(shape) * BYTES.get(dtype, 1) for shape, dtype in filter(None, stored)]
        return 2 * sum(sizes) / param.numel()

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantise(self)

    def put(self, model: PreTrainedModel, name: str, weight: torch.Tensor) -> None:
        """A layer in its format, of the weight that was read, in the place of the one in floats."""
        layer: Any = model.get_submodule(name)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        new = converted(name, layer, self._formats[name], self.quantization_config.scale_rule, None, pack=False)
        if new.format is not None:
            read = torch.zeros(1, dtype=torch.uint8)
            read._is_hf_initialized = True  # type: ignore[attr-defined]
            stand_in(new, read)
        replace_layers(model, {name: layer}, {name: new})

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        if not self.pre_quantized:
            self._put_the_rest(model)
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            if "weight" in module._buffers:
                del module.weight
                module.register_parameter("weight", None)
            if self.pre_quantized and name in self._formats:
                self._check_read(name, module)
            if module.format is not None:
                try:
                    module.pack_now()
                except ValueError as error:
                    raise ValueError(f"[HeddleConfig] layer '{name}': {error}") from error
        self._formats = {}
        self.quantization_config.layers = _formats_of(model)
        return model

    def _put_the_rest(self, model: PreTrainedModel) -> None:
        """Layers whose weight was cut from one with another's, which is not quantised: get_quantize_ops was not asked. What
        the checkpoint lacked, and transformers has drawn, stays."""
        for name in self._formats:
            layer: Any = model.get_submodule(name)
            if not isinstance(layer, nn.Linear) and getattr(layer.weight, "_is_hf_initialized", False):
                self.put(model, name, layer.weight.detach())

    def _check_read(self, name: str, layer: nn.Linear) -> None:
        tensors = layer.state_dict(keep_vars=True)
        lacking = [key for key, tensor in tensors.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if lacking:
            raise ValueError(f"[HeddleConfig] layer '{name}': the checkpoint lacks {', '.join(lacking)}")
        wanted = weights_and_x(self._formats[name])[0]
        if layer.format is not None and (stored := bytes(tensors["format_name"].tolist()).decode()) != wanted:
            raise ValueError(f"[HeddleConfig] layer '{name}' is {stored}, and quantization_config says {wanted}")

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        layers = _formats_of(model)
        self.quantization_config.layers = layers
        state = model.state_dict()
        for name in layers:
            layer: Any = model.get_submodule(name)
            if layer.format is None:
                continue
            if not hasattr(layer, "codes") or layer.column_order is not None or layer.activation != "none":
                has = "columns in another order or an activation" if hasattr(layer, "codes") else "packed weights alone"
                raise ValueError(
                    f"[save_pretrained] layer '{name}' has {has}, which from_pretrained does not read: save the model's "
                    "state_dict"
                )
            # Without Heddle transformers would draw a weight that it does not find, with no more than a warning. One of
            # another shape is an error.
            state[f"{name}.weight"] = torch.zeros(1, dtype=torch.uint8)
        _leave_in_format(model, {key for key in state if key.rpartition(".")[0] in layers})
        return state, {}

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # as save_pretrained leaves it in the config
        found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        new = {}
        for name, layer in found.items():
            floats = torch.nn.Linear(layer.in_features, layer.out_features, False, device="meta")
            floats.weight = torch.nn.Parameter(layer.dequantized().to(dtype))
            floats.register_parameter("bias", layer.bias)
            new[name] = floats.train(layer.training)
        replace_layers(model, found, new)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters are: x has gradients, W is frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def stand_in(layer: nn.Linear, tensor: torch.Tensor, persistent: bool = True) -> None:
    """A `weight` for a quantised layer while its model is loaded: models look for one in what initialises them, and files
    have one (see get_state_dict_and_metadata)."""
    del layer.weight
    layer.register_buffer("weight", tensor, persistent=persistent)


def _formats_of(model: PreTrainedModel) -> dict[str, PolicyName]:
    """The format of each layer of Heddle's in a model."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: format for name, layer in layers.items() if (format := format_of(layer)) != "float32"}


def _leave_in_format(model: PreTrainedModel, keys: set[str]) -> None:
    """Has save_pretrained leave these tensors alone, where it undoes what conversions of weights did on load: they are to
    cut and join floats."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in conversions if not isinstance(each, PrefixChange)]

    def touches(conversion):
        back = conversion.reverse_transform()
        return any(back.rename_source_key(key)[1] is not None for key in keys)

    kept = [each for each in conversions if not (isinstance(each, WeightConverter) and touches(each))]
    model._weight_conversions = kept  # type: ignore[assignment]


def quantize_model(
    model: PreTrainedModel,
    config: HeddleConfig | nn.Policy | Mapping[str, str] | PolicyName = "nvfp4",
    *,
    importance: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """``heddle.nn.quantize_model`` of a model of transformers that is there already, which then knows how to be saved:
    ``save_pretrained`` and ``from_pretrained`` keep it to the bit.

    Args:
      model: changed in place.
      config: as for loading; a format is ``HeddleConfig(format)``, a policy or its rules are all that is quantised.
      importance: see ``heddle.nn.quantize_model``.

    Raises:
      ValueError: as ``HeddleConfig.chosen`` and ``heddle.nn.quantize_model`` raise it, or a model that another tool has
        quantised. TypeError: no model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"[quantize_model] model is a {type(model).__name__}: it must be a PreTrainedModel; heddle.nn.quantize_model takes "
            "any module"
        )
    if (other := getattr(model, "quantization_method", None)) not in (None, METHOD):
        raise ValueError(f"[quantize_model] model is quantised by {getattr(other, 'value', other)} already")
    if isinstance(config, str):
        config = HeddleConfig(config)
    elif not isinstance(config, HeddleConfig):
        config = HeddleConfig(None, policy=config)
    rules = [(literal(name), format) for name, format in config.chosen(model).items()]
    nn.quantize_model(model, nn.Policy(rules, scale_rule=config.scale_rule), importance=importance)
    quantizer = HeddleQuantizer(config, pre_quantized=False)
    for name, value in (("hf_quantizer", quantizer), ("is_quantized", True), ("quantization_method", METHOD)):
        setattr(model, name, value)  # as from_pretrained does
    quantizer.postprocess_model(model)
    return model
