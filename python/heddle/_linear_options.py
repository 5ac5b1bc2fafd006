"""The options of linear layers, and what a call says of packed weights: two tuples for the native module and the
operators."""

from __future__ import annotations

from typing import Any

from . import _heddle
from ._options import Option, check_names, schema

#: The options, in their order; arrays come first. The native module has the same names in the same order.
OPTIONS = (
    Option("bias", "Tensor?", gradient=True),
    Option("residual", "Tensor?", gradient=True),
    Option("norm_weight", "Tensor?", gradient=True),
    Option("norm_bias", "Tensor?", gradient=True),
    Option("activation", "str", "none"),
    Option("norm", "str", "none"),
    Option("norm_eps", "float", 1e-5),
    Option("int8_x", "bool", False),
    Option("batch_invariant", "bool", False),
    Option("force", "str", ""),
)
INDEX = {option.name: i for i, option in enumerate(OPTIONS)}
ARRAYS = next(i for i, option in enumerate(OPTIONS) if option.schema != "Tensor?")
ARRAY_NAMES = tuple(option.name for option in OPTIONS[:ARRAYS])
BIAS, RESIDUAL, NORM_WEIGHT, NORM_BIAS, ACTIVATION, NORM, NORM_EPS, _FORCE = (
    INDEX[name] for name in ("bias", "residual", "norm_weight", "norm_bias", "activation", "norm", "norm_eps", "force")
)

#: Packed weights, in front of the options: all but weights, which are bytes, and kept describe them.
PARTS = (
    Option("format", "str"),
    Option("rows", "int"),
    Option("columns", "int"),
    Option("gated", "bool"),
    Option("order", "str"),
    Option("weights", "Tensor"),
    Option("kept", "Tensor?"),
)
WEIGHTS = [part.name for part in PARTS].index("weights")
PARTS_SCHEMA, OPTIONS_SCHEMA = schema(options=PARTS), schema(options=OPTIONS)

check_names(_heddle.packed_part_names(), [part.name for part in PARTS])
check_names(_heddle.linear_option_names(), list(INDEX))

#: Candidates that a forward and its backward may both be asked for by name.
_BOTH_WAYS = ("cpu", "reference", "cublaslt")


def changed(options: tuple[Any, ...], **values: Any) -> tuple[Any, ...]:
    """The options with some of them replaced."""
    return tuple(values.get(option.name, item) for option, item in zip(OPTIONS, options))


def without_norm(options: tuple[Any, ...]) -> tuple[Any, ...]:
    return changed(options, norm="none", norm_weight=None, norm_bias=None)


def of_backward(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of a forward as its backward takes them."""
    return changed(options, residual=None, force=options[_FORCE] if options[_FORCE] in _BOTH_WAYS else "")
