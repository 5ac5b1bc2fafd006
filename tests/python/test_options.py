"""The tables of attention's and of linear layers' options, and what is written out beside them for speed."""

import inspect

import heddle
import numpy as np
import pytest
import torch
from heddle import _linear_options, _options, functional, lowbit
from heddle._options import INDEX, OPTIONS, WITH_GRADIENT, pack

#: A value of each argument of heddle.attention that is not its default, and what comes of it, item by item.
GIVEN = {
    "scale": (0.5, {"scale": 0.5}),
    "causal": ("bottom_right", {"causal": 2}),
    "window": ((3, None), {"window_left": 3, "window_right": -1}),
    "q_step": (4, {"q_step": 4}),
    "key_step": (16, {"key_step": 16}),
    "softcap": (30.0, {"softcap": 30.0}),
    "dropout_p": (0.25, {"dropout_p": 0.25}),
    "dropout_seed": (7, {"dropout_seed": 7}),
    "max_seqlen_q": (11, {"max_seqlen_q": 11}),
    "max_seqlen_k": (12, {"max_seqlen_k": 12}),
    "batch_invariant": (True, {"batch_invariant": True}),
    "deterministic": (True, {"deterministic": True}),
    "out_dtype": ("float32", {"float32_out": True}),
    "precision": ("tf32", {"precision": 1}),
    "method": ("flash", {"method": "flash"}),
    "force": ("cpu", {"force": "cpu"}),
} | {name: (marker, {name: marker}) for name in _options.ARRAY_NAMES for marker in [np.zeros(1)]}

DEFAULTS = tuple(option.default for option in OPTIONS)


def items_of(**arguments):
    """The tuple that heddle.attention makes of its arguments."""
    seen = []
    q = np.zeros((1, 1, 1, 4), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional.arrays, "attention", lambda q, k, v, items, return_lse: seen.append(items))
        heddle.attention(q, q, q, **arguments)
    return seen[0]


def test_every_argument_is_given_here():
    keywords = [p.name for p in inspect.signature(heddle.attention).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert sorted(keywords) == sorted([*GIVEN, "return_lse", "out", "lse_out"])


@pytest.mark.parametrize("make", [items_of, pack])
def test_without_arguments_come_the_defaults(make):
    assert make() == DEFAULTS


@pytest.mark.parametrize("make", [items_of, pack])
@pytest.mark.parametrize("name", GIVEN)
def test_an_argument_changes_its_items_alone(make, name):
    value, expected = GIVEN[name]
    found = make(**{name: value})
    assert len(found) == len(OPTIONS)
    for option, item, default in zip(OPTIONS, found, DEFAULTS):
        wanted = expected.get(option.name, default)
        assert item is wanted or item == wanted, option.name


def test_pack_refuses_what_is_no_option():
    with pytest.raises(TypeError, match="no option colour, sie"):
        pack(sie=1, colour=2)


def test_sdpa_writes_the_same_tuple():
    from heddle.hosts.torch import sdpa as _torch_sdpa

    bias, mask = torch.zeros(1), torch.ones(1, dtype=torch.bool)
    found = _torch_sdpa._options(bias, mask, 0.5, 1, 0.25)
    assert found == pack(bias=bias, mask=mask, scale=0.5, causal="top_left", dropout_p=0.25)


@pytest.mark.parametrize(
    "operator, operands",
    [
        ("attention_forward", 3),
        ("attention_backward", 8),
        ("attention_with_kv_cache", 8),
        ("attention_over_int4_cache", 6),
        ("attention_forward_out", 5),
        ("attention_with_kv_cache_out", 10),
        ("attention_over_int4_cache_out", 8),
        ("sparse_attention", 10),
        ("sparse_attention_out", 12),
        ("sparse_attention_backward", 15),
    ],
)
def test_operators_take_them_in_that_order(operator, operands):
    arguments = getattr(torch.ops.heddle, operator).default._schema.arguments
    assert tuple(a.name for a in arguments[operands:]) == tuple(INDEX)
    for argument, option in zip(arguments[operands:], OPTIONS):
        kind = {"Tensor?": "Optional[Tensor]", "float?": "Optional[float]", "SymInt": "int"}.get(
            option.schema, option.schema
        )
        assert str(argument.type) == kind, option.name


def test_options_with_gradients_are_differentiable():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 2, 4) for _ in range(3))
    given = {"bias": torch.randn(1, 2, 3, 3), "sink": torch.randn(2)}
    assert [OPTIONS[i].name for i in WITH_GRADIENT] == list(given)
    for name, value in given.items():
        value.requires_grad_(True)
        out = torch.ops.heddle.attention_forward.default(q, k, v, *pack(**{name: value}))[0]
        assert torch.autograd.grad(out.sum(), value)[0].shape == value.shape


def test_a_native_module_with_other_options_is_refused():
    _options.check_names(tuple(INDEX))
    with pytest.raises(ImportError, match="their options differ, 'seed' and 'alibi_slopes'"):
        _options.check_names(("seed", *INDEX))
    with pytest.raises(ImportError, match=f"their options differ, {len(INDEX) - 1} and {len(INDEX)}"):
        _options.check_names(tuple(INDEX)[:-1])


def test_numbers_of_enumerations_that_differ_are_refused():
    _options.check_codes({kind: dict(codes) for kind, codes in _options.CODES.items()})
    for kind, other, words in [
        ("dtype", {"bool": 5}, "dtype 'bool' is 5 there and 4 here"),
        ("causal", {"spiral": 3}, "causal 'spiral' is 3 there and None here"),
        ("layout", {"rows": 0}, "layout 'rows' is 0 there and None here"),
    ]:
        with pytest.raises(ImportError, match=f"are of different versions: {words}"):
            _options.check_codes(_options.CODES | {kind: _options.CODES.get(kind, {}) | other})
    for kind, codes in _options.CODES.items():
        with pytest.raises(ImportError, match=rf"{kind} '\w+' is None there and \d here"):
            _options.check_codes(_options.CODES | {kind: dict(list(codes.items())[1:])})


#: As GIVEN, of heddle.lowbit.linear.
LINEAR_GIVEN = {
    "activation": ("silu", {"activation": "silu"}),
    "norm": ("rms_norm", {"norm": "rms_norm"}),
    "eps": (0.5, {"norm_eps": 0.5}),
    "int8_x": (True, {"int8_x": True}),
    "batch_invariant": (1, {"batch_invariant": True}),
    "force": ("cpu", {"force": "cpu"}),
} | {name: (marker, {name: marker}) for name in _linear_options.ARRAY_NAMES for marker in [np.zeros(1)]}
PACKED = lowbit.pack(lowbit.quantize(np.ones((16, 32), np.float32), "nvfp4"))


def linear_items_of(x, host, **arguments):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "linear", lambda x, parts, options, out=None: seen.extend([parts, options]))
        lowbit.linear(x, PACKED, **arguments)
    return seen


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", [None, *LINEAR_GIVEN])
def test_linear_writes_out_its_tables(library, name):
    from heddle.hosts import arrays
    from heddle.hosts.torch import functional as torch_functional

    x, host = (np.zeros((1, 32), np.float32), arrays) if library == "numpy" else (torch.zeros(1, 32), torch_functional)
    value, expected = LINEAR_GIVEN[name] if name else (None, {})
    parts, options = linear_items_of(x, host, **({name: value} if name else {}))
    assert parts[:5] == ("nvfp4", 16, 32, False, "rows16") and parts[_linear_options.WEIGHTS] is not None
    assert len(parts) == len(_linear_options.PARTS) and len(options) == len(_linear_options.OPTIONS)
    for option, item in zip(_linear_options.OPTIONS, options):
        wanted = expected.get(option.name, option.default)
        assert item is wanted or item == wanted, option.name


def test_every_argument_of_linear_is_given_here():
    keywords = [p.name for p in inspect.signature(lowbit.linear).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert sorted(keywords) == sorted([*LINEAR_GIVEN, "out"])


@pytest.mark.parametrize(
    "operator, operands, between", [("linear_forward", 1, 0), ("linear_forward_out", 1, 1), ("linear_backward", 2, 1)]
)
def test_operators_take_linears_tables(operator, operands, between):
    arguments = [a.name for a in getattr(torch.ops.heddle, operator).default._schema.arguments]
    parts = [part.name for part in _linear_options.PARTS]
    assert arguments[operands:][: len(parts)] == parts
    assert arguments[operands + len(parts) + between :] == list(_linear_options.INDEX)


def test_flags_of_linear_are_flags():
    x = np.zeros((1, 32), np.float32)
    for name in ("int8_x", "batch_invariant"):
        for call, operation in ((lowbit.linear, "linear_forward"), (lowbit.explain, "explain_linear")):
            with pytest.raises(TypeError, match=rf"\[{operation}\] {name} is 'none': it must be True or False"):
                call(x, PACKED, **{name: "none"})
    odd = lowbit.PackedTensor("nvfp4", (16, 32), "no", PACKED.data)
    with pytest.raises(TypeError, match=r"\[linear_forward\] gated is 'no': it must be True or False"):
        lowbit.linear(x, odd)
    with pytest.raises(TypeError, match=r"\[linear_forward\] norm_eps is 'small': it must be a number"):
        lowbit.linear(x, PACKED, eps="small")
