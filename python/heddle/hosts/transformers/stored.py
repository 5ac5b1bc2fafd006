"""Models of transformers from checkpoints whose layers other tools read too: what `heddle quantize` writes, GPTQ, AWQ and their
kin. heddle.hosts.transformers has the public name."""

from __future__ import annotations

import copy
import math
import os
import re
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import register_quantization_config, register_quantizer

from ... import _heddle, lowbit, nn
from ...nn.policy import replace_layers
from .quantization_config import METHOD, HeddleConfig
from .quantizer import BYTES, HeddleQuantizer, stand_in

_METHOD = "heddle_stored"  # while a model is loaded; afterwards it is one of HeddleConfig's
_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def load_quantized(
    path: str | os.PathLike[str], model_class: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """A model of transformers from a quantised checkpoint, whose layers stay in their formats, to the bit.

    >>> model = heddle.hosts.transformers.load_quantized("Llama-3.2-1B-nvfp4", attn_implementation="heddle")

    It takes what ``heddle quantize`` and ``heddle.lowbit.quantize_checkpoint`` write, what ``save_pretrained`` of a model of
    Heddle's writes, and the other layouts that ``heddle.lowbit.load`` reads, of linear layers: compressed-tensors, bitsandbytes in
    4 bits, GPTQ, AWQ, ModelOpt. The model knows how to be saved, as one of ``HeddleConfig`` does.

    Args:
      path: of a folder with config.json and safetensors files, or a name of the Hub, as ``from_pretrained`` takes it.
      model_class: whose ``from_pretrained`` makes the model.
      options: that method's own: dtype, device_map, attn_implementation and so on.

    Raises:
      ValueError: config.json without a quantization_config; a layer that Heddle cannot read, that has no torch.nn.Linear of its
        shape in the model, or whose bias is missing; the message has its name.
    """
    for name in ("quantization_config", "state_dict", "gguf_file"):
        if options.get(name) is not None:
            raise ValueError(f"[load_quantized] {name} is given: the checkpoint says what is in it")
    config = options.pop("config", None)
    if config is None:
        of_the_hub = {name: options[name] for name in _OF_THE_HUB if name in options}
        config = AutoConfig.from_pretrained(path, **of_the_hub)
    config = copy.deepcopy(config)
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        raise ValueError(
            f"[load_quantized] config.json of '{os.fspath(path)}' has no quantization_config: from_pretrained with "
            "quantization_config=HeddleConfig(...) quantises a model in floats as it is read"
        )
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    if method != METHOD:
        config.quantization_config = {"quant_method": _METHOD}
    return model_class.from_pretrained(path, config=config, **options)


@register_quantization_config(_METHOD)
class _StoredConfig(HeddleConfig):
    """Has no formats: the files do."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = _METHOD  # type: ignore[assignment]  # transformers' own are an enumeration


@register_quantizer(_METHOD)
class _StoredQuantizer(HeddleQuantizer):
    def __init__(self, quantization_config: HeddleConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._files: list[str] = []
        self._stored: dict[str, lowbit.StoredLayer] = {}  # by layer of the model that is being loaded

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        self._files = [file for file in checkpoint_files or [] if file.endswith(".safetensors")]
        if not self._files:
            raise ValueError("[load_quantized] the checkpoint has no safetensors file, which others are not read for")
        layers = nn.linear_layers(model)
        ignored, new = [], {}
        place = _Places(model)
        for stored in lowbit.layers(self._files).values():
            name, converted = place.of(f"{stored.name}.weight")
            ignored += [stored.name, name]
            if name not in place.modules and not converted:
                continue  # a head that this class does not have
            if stored.refusal:
                raise ValueError(f"[load_quantized] layer '{stored.name}': {stored.refusal}")
            if stored.experts or converted or name not in layers:
                why = (
                    "has its experts in one parameter"
                    if stored.experts or converted
                    else "has no torch.nn.Linear there"
                )
                raise ValueError(
                    f"[load_quantized] layer '{stored.name}' is {stored.format}, and {type(model).__name__} {why}: it must stay "
                    "in floats (heddle quantize --keep)"
                )
            if stored.shape != (layers[name].out_features, layers[name].in_features):
                raise ValueError(
                    f"[load_quantized] layer '{stored.name}' is {list(stored.shape)}, and the model's is "
                    f"[{layers[name].out_features}, {layers[name].in_features}]"
                )
            if f"{name}.weight" in model.all_tied_weights_keys:
                raise ValueError(
                    f"[load_quantized] layer '{stored.name}' is {stored.format}, and shares its weight with another module "
                    "(tied embeddings), which cannot read it"
                )
            assert stored.format is not None
            self._stored[name], self._formats[name] = stored, stored.format
            new[name] = nn.Linear.from_linear(layers[name])
            stand_in(new[name], torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)
            new[name]._is_hf_initialized = True  # type: ignore[assignment]  # nothing is to be drawn
        if not new:
            raise ValueError(
                f"[load_quantized] the checkpoint has no layer in a format that {type(model).__name__} has"
            )
        self._check_floats(place, layers.keys() - new.keys())
        replace_layers(model, layers, new)
        # What the files have of these layers is read by lowbit.load.
        patterns = {rf"^{re.escape(name)}\.(?!bias$)" for name in ignored}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *patterns}

    def _check_floats(self, place: _Places, layers: set[str]) -> None:
        """What no layout is known of must not be taken for weights: transformers would cast codes to floats."""
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    layer, _, parameter = key.rpartition(".")
                    if parameter != "weight" or place.of(key)[0] not in layers:
                        continue
                    if (dtype := file.get_slice(key).get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                        raise ValueError(
                            f"[load_quantized] layer '{layer}' has a weight of {dtype} in a layout that heddle.lowbit does not know"
                        )

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        layer, _, parameter = param_name.rpartition(".")
        if layer not in self._stored or parameter == "bias":
            return param.element_size()
        parts = filter(None, _heddle.lowbit_storage(self._formats[layer], *self._stored[layer].shape))
        return 2 * sum(math.prod(shape) * BYTES.get(dtype, 1) for shape, dtype in parts)  # packed weights lie beside it

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **rest: Any) -> PreTrainedModel:
        for name, stored in self._stored.items():
            layer: Any = model.get_submodule(name)
            if layer.bias is not None and not getattr(layer.bias, "_is_hf_initialized", False):
                raise ValueError(f"[load_quantized] layer '{name}': the checkpoint lacks bias")
            device, order = layer.weight.device, stored.column_order
            matrix = lowbit.load(self._files, stored.name, reorder_columns=order is not None, framework="torch")
            layer.hold(matrix, None if order is None else torch.tensor(order))
            layer.to(device)
        self._stored, self._formats = {}, {}
        super()._process_model_after_weight_loading(model, **rest)
        formats = self.quantization_config.layers
        final = HeddleQuantizer(HeddleConfig(None, layers=formats))
        model.config.quantization_config = final.quantization_config
        for attribute, value in (("hf_quantizer", final), ("quantization_method", METHOD)):
            setattr(model, attribute, value)
        return model


class _Places:
    """Where transformers puts a tensor of a file."""

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._prefix, self._state = model.base_model_prefix, model.state_dict()
        self.modules = dict(model.named_modules())

    def of(self, key: str) -> tuple[str, bool]:
        """The module of a weight, and whether others' weights are in that parameter too, or it is cut from this one."""
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
        if name not in self._state and key in self._state:
            name, pattern = key, None
        return name.removesuffix(".weight"), pattern is not None
